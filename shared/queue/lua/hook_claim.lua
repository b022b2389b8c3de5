-- NEEDS hooks
-- Take deliveries that are due, few of each host, and let each be due again later should its sender be killed.
-- KEYS[1]  prefix
-- ARGV     most deliveries, most of one host, ms until they are due again, then pairs: host, deliveries under way to it
-- Returns  for each {id, fields of the delivery, endpoint or account as JSON | ''}
local now, most, of_host, again = clock_ms(), tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local under_way, out = {}, {}
for at = 4, #ARGV, 2 do under_way[ARGV[at]] = tonumber(ARGV[at + 1]) end
local HOSTS = 500

for _, host in ipairs(redis.call('ZRANGEBYSCORE', key.hook_hosts, '-inf', whole(now), 'LIMIT', 0, HOSTS)) do
  local room = math.min(of_host - (under_way[host] or 0), most - #out)
  if room > 0 then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.hook_due(host), '-inf', whole(now), 'LIMIT', 0, room)) do
      local fields = redis.call('HGETALL', key.delivery(id))
      if #fields == 0 then
        redis.call('ZREM', key.hook_due(host), id)
      else
        redis.call('ZADD', key.hook_due(host), whole(now + again), id)
        local d = redis.call('HMGET', key.delivery(id), 'tenant', 'endpoint')
        local field = d[2] == 'job' and 'account' or d[2]
        table.insert(out, {id, fields, redis.call('HGET', key.hooks(d[1]), field) or ''})
      end
    end
    hooks.refresh_host(host)
  end
end
return out
