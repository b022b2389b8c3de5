-- RUNS when Redis is full
-- Delete the record of an adapter, or end its upload; its parts are due for deletion at once.
-- args     tenant, adapter_id, unfinished
--          `unfinished`: 1 to end an upload only
-- Returns  {'ok', row of the retention}, {'live', ''} while a job uses it, or {'none', ''}
local tenant, id = args.tenant, args.adapter_id
local name = key.adapter(tenant, id)
local known = redis.call('HMGET', name, 'size', 'live', 'record')
if not known[1] or (args.unfinished and known[3]) then return {'none', ''} end
if (tonumber(known[2] or nil) or 0) > 0 then return {'live', ''} end
local row = 'adapter|' .. tenant .. '|' .. id .. '||' .. known[1]
redis.call('DEL', name)
redis.call('ZREM', key.adapters(tenant), id)
redis.call('ZREM', key.all_adapters, tenant .. '|' .. id)
redis.call('ZADD', key.retention, whole(clock_ms()), row)
return {'ok', row}
