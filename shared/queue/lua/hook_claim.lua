-- NEEDS hooks
-- Claim due deliveries, a few per host; each is due again later in case its sender is killed.
-- KEYS[1]  prefix
-- ARGV     max deliveries, max per host, ms until they are due again, then pairs: host, running deliveries
-- Returns  for each {id, fields of the delivery, endpoint or account as JSON | ''}
local now, limit, per_host, again = clock_ms(), tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local running, claimed = {}, {}
for at = 4, #ARGV, 2 do running[ARGV[at]] = tonumber(ARGV[at + 1]) end
local MAX_HOSTS = 500

for _, host in ipairs(redis.call('ZRANGEBYSCORE', key.hook_hosts, '-inf', whole(now), 'LIMIT', 0, MAX_HOSTS)) do
  local free = math.min(per_host - (running[host] or 0), limit - #claimed)
  if free > 0 then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.hook_due(host), '-inf', whole(now), 'LIMIT', 0, free)) do
      local fields = redis.call('HGETALL', key.delivery(id))
      if #fields == 0 then
        redis.call('ZREM', key.hook_due(host), id)
      else
        redis.call('ZADD', key.hook_due(host), whole(now + again), id)
        local d = redis.call('HMGET', key.delivery(id), 'tenant', 'endpoint')
        local field = d[2] == 'job' and 'account' or d[2]
        table.insert(claimed, {id, fields, redis.call('HGET', key.hooks(d[1]), field) or ''})
      end
    end
    hooks.refresh_host(host)
  end
end
return claimed
