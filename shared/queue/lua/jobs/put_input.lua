-- Store an input image's record and the expiry of its object. A known record is kept, its time starts again.
-- ARGV     tenant, input_id, ref, ttl_ms, name
--          `name`: of the object, below the input's id
-- Returns  the stored record
local name, ttl = key.input(ARGV[1], ARGV[2]), tonumber(ARGV[4])
local known = redis.call('HMGET', name, 'ref', 'object', 'live')
local ref, object = ARGV[3], ARGV[5]
if known[1] then ref, object = known[1], known[2] or ''
else redis.call('HSET', name, 'ref', ref, 'object', object) end
if (tonumber(known[3] or nil) or 0) > 0 then redis.call('PERSIST', name)
else redis.call('PEXPIRE', name, ttl) end
-- The row names the object: an image stored again while its old object is being deleted has its own row.
local row = 'input|' .. ARGV[1] .. '|' .. ARGV[2] .. '|' .. object
local due, set = clock_ms() + ttl + 60000, tonumber(redis.call('ZSCORE', key.retention, row) or nil)
if not set or set < due then redis.call('ZADD', key.retention, whole(due), row) end
return ref
