-- NEEDS webhooks
-- RUNS when Redis is full
-- Claim due deliveries, a few per host; each is due again later in case its sender is killed.
-- ARGV     limit, max_per_host, again_ms, in_progress...
--          `in_progress`: pairs of host and deliveries in progress to it
-- Returns  for each {id, fields of the delivery, endpoint or account as JSON | ''}
local now, limit, per_host, again = clock_ms(), tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local running, claimed = {}, {}
for at = 4, #ARGV, 2 do running[ARGV[at]] = tonumber(ARGV[at + 1]) end
local MAX_HOSTS = 500

for _, host in ipairs(redis.call('ZRANGEBYSCORE', key.webhook_hosts, '-inf', whole(now), 'LIMIT', 0, MAX_HOSTS)) do
  local free = math.min(per_host - (running[host] or 0), limit - #claimed)
  if free > 0 then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.webhook_due(host), '-inf', whole(now), 'LIMIT', 0, free)) do
      local fields = redis.call('HGETALL', key.webhook_delivery(id))
      if #fields == 0 then
        redis.call('ZREM', key.webhook_due(host), id)
      else
        redis.call('ZADD', key.webhook_due(host), whole(now + again), id)
        local d = redis.call('HMGET', key.webhook_delivery(id), 'tenant', 'endpoint')
        local field = d[2] == 'job' and 'account' or d[2]
        table.insert(claimed, {id, fields, redis.call('HGET', key.webhook_endpoints(d[1]), field) or ''})
      end
    end
    webhooks.refresh_host(host)
  end
end
return claimed
