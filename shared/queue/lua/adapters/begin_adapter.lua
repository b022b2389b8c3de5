-- NEEDS footprint
-- Count an upload of an adapter, and schedule the deletion of its parts before they are stored; put_adapter cancels it.
-- args     tenant, adapter_id, size, objects, most_of_tenant, most, remove_after_ms
--          `size`: bytes to be stored, in that many `objects`
-- Returns  'ok', 'tenant_full', 'full' or the name of the quota that is used up
local tenant, id, now = args.tenant, args.adapter_id, clock_ms()
local name = key.adapter(tenant, id)
if redis.call('EXISTS', name) == 1 then return 'ok' end
if redis.call('ZCARD', key.adapters(tenant)) >= args.most_of_tenant then return 'tenant_full' end
if redis.call('ZCARD', key.all_adapters) >= args.most then return 'full' end
local size = footprint.of_adapter(args.size, args.objects)
local row = 'adapter|' .. tenant .. '|' .. id .. '||' .. size
local counted = redis.call('ZSCORE', key.retention, row) -- by an upload that failed, and is not yet deleted
if not counted then
  local quota = footprint.exceeded(footprint.read(tenant), footprint.numbers(size))
  if quota then return quota end
  footprint.change(tenant, '', size)
end
redis.call('HSET', name, 'size', size)
redis.call('ZADD', key.adapters(tenant), whole(now), id)
redis.call('ZADD', key.all_adapters, whole(now), tenant .. '|' .. id)
redis.call('ZADD', key.retention, whole(now + args.remove_after_ms), row)
return 'ok'
