-- RUNS when Redis is full
-- Publish an adapter whose parts are stored; it is kept until it is deleted.
-- args     tenant, adapter_id, record
-- Returns  1, or 0 if its upload was given up
local tenant, id = args.tenant, args.adapter_id
local name, KEPT = key.adapter(tenant, id), 9007199254740991
local size = redis.call('HGET', name, 'size')
if not size then return 0 end
local row = 'adapter|' .. tenant .. '|' .. id .. '||' .. size
-- One that is due can be in deletion already.
if tonumber(redis.call('ZSCORE', key.retention, row) or 0) <= clock_ms() then return 0 end
redis.call('HSET', name, 'record', args.record)
redis.call('ZADD', key.retention, whole(KEPT), row)
return 1
