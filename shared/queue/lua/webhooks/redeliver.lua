-- NEEDS webhooks
-- Attempt a delivery again, or create one for a test event.
-- ARGV     delivery_id, tenant, new...
--          `new`: endpoint, url and type of a delivery to be created
-- Returns  1, or 0 for an unknown delivery
local id, tenant, now = ARGV[1], ARGV[2], clock_ms()
if ARGV[3] then
  webhooks.create({id = id, event = string.match(id, '^(.-)%.we_') or id, tenant = tenant, endpoint = ARGV[3], url = ARGV[4],
    host = webhooks.host_of(ARGV[4]), job = '', type = ARGV[5], at = whole(now)}, now)
  return 1
end
local name = key.webhook_delivery(id)
local d = redis.call('HMGET', name, 'tenant', 'host')
if d[1] ~= tenant then return 0 end
redis.call('HSET', name, 'state', 'pending', 'attempts', 0)
webhooks.due(id, tenant, d[2], now)
return 1
