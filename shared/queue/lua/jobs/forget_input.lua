-- RUNS when Redis is full
-- Delete the record of an input image; its object is due for deletion at once.
-- args     tenant, input_id
-- Returns  {'ok', row of the retention}, {'live', ''} while a job uses it, or {'none', ''}
local tenant, id = args.tenant, args.input_id
local name = key.input(tenant, id)
local known = redis.call('HMGET', name, 'ref', 'object', 'size', 'live')
if not known[1] then return {'none', ''} end
if (tonumber(known[4] or nil) or 0) > 0 then return {'live', ''} end
local row = 'input|' .. tenant .. '|' .. id .. '|' .. (known[2] or '') .. '|' .. (known[3] or '')
redis.call('DEL', name)
redis.call('ZREM', key.inputs(tenant), id)
redis.call('ZADD', key.retention, whole(clock_ms()), row)
return {'ok', row}
