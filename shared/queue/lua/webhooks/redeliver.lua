-- NEEDS webhooks
-- Attempt a delivery again, or create one for a test event.
-- args     delivery_id, tenant, new...
--          `new`: a delivery to be created
-- Returns  1, or 0 for an unknown delivery
local id, tenant, now = args.delivery_id, args.tenant, clock_ms()
local new = args.new[1]
if new then
  webhooks.create({id = id, event = string.match(id, '^(.-)%.we_') or id, tenant = tenant, endpoint = new.endpoint,
    url = new.url, host = webhooks.host_of(new.url), job = '', type = new.type, at = whole(now)}, now)
  return 1
end
local name = key.webhook_delivery(id)
local d = redis.call('HMGET', name, 'tenant', 'host')
if d[1] ~= tenant then return 0 end
redis.call('HSET', name, 'state', 'pending', 'attempts', 0)
webhooks.due(id, tenant, d[2], now)
return 1
