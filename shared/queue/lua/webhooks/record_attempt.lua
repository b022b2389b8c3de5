-- NEEDS webhooks
-- RUNS when Redis is full
-- Record a delivery attempt; disables an endpoint that is gone or has failed for too long.
-- args     delivery_id, state, retry_ms, attempt, gone, disable_after_ms
--          `state`: 'delivered', 'pending' or 'failed'; `retry_ms`: none without a retry; `gone`: the endpoint is
-- Returns  1, or 0 for an unknown delivery
local id, state, now = args.delivery_id, args.state, clock_ms()
local name = key.webhook_delivery(id)
local d = redis.call('HMGET', name, 'tenant', 'endpoint', 'host', 'log')
if not d[1] then return 0 end
local tenant, endpoint, host = d[1], d[2], d[3]
local log = d[4] and cjson.decode(d[4]) or {}
table.insert(log, cjson.decode(args.attempt))
while #log > 20 do table.remove(log, 1) end
redis.call('HINCRBY', name, 'attempts', 1)
redis.call('HSET', name, 'state', state, 'log', cjson.encode(log))
if state == 'pending' then
  redis.call('HSET', name, 'next_at_ms', whole(now + args.retry_ms))
  redis.call('ZADD', key.webhook_due(tenant, host), whole(now + args.retry_ms), id)
else
  redis.call('HDEL', name, 'next_at_ms')
  redis.call('ZREM', key.webhook_due(tenant, host), id)
end
webhooks.refresh_host(tenant, host)
local stored = redis.call('HGET', key.webhook_endpoints(tenant), endpoint)
if endpoint == 'job' or not stored then return 1 end
local known = cjson.decode(stored)
if state == 'delivered' then
  if not known.failing_since then return 1 end
  known.failing_since = nil
else
  known.failing_since = known.failing_since or now
  local reason = args.gone and 'the endpoint responded with 410 Gone'
    or now - known.failing_since > args.disable_after_ms and 'the endpoint has failed for too long'
  if reason then
    known.enabled = false
    known.disabled_reason = reason
  end
end
redis.call('HSET', key.webhook_endpoints(tenant), endpoint, cjson.encode(known))
if not known.enabled then webhooks.refresh(tenant) end
return 1
