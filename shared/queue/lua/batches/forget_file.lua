-- NEEDS footprint
-- RUNS when Redis is full
-- Delete a file that no batch reads, or end the upload of one; its stored parts are due for deletion at once.
-- args     tenant, file_id, unfinished
-- Returns  'ok' | 'none' | 'live'
local tenant, id = args.tenant, args.file_id
local name = key.file(tenant, id)
if (redis.call('EXISTS', name) == 0) ~= args.unfinished then return 'none' end
if (tonumber(redis.call('HGET', name, 'live') or nil) or 0) > 0 then return 'live' end
footprint.change(tenant, footprint.of_parts(redis.call('LRANGE', key.file_parts(tenant, id), 0, -1)), '')
redis.call('DEL', name, key.file_parts(tenant, id))
redis.call('ZREM', key.files(tenant), id)
redis.call('ZADD', key.retention, whole(clock_ms()), 'file|' .. tenant .. '|' .. id .. '|')
return 'ok'
