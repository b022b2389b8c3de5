-- Remember a picture, and when its object may be removed. One that is known already stays as it is, its time starts anew.
-- KEYS[1]  prefix
-- ARGV     tenant, input_id, ref, ttl_ms, name
--          `name`: of the object, below the input's id
-- Returns  what is known of it
local name, ttl = key.input(ARGV[1], ARGV[2]), tonumber(ARGV[4])
local known = redis.call('HMGET', name, 'ref', 'object', 'live')
local ref, object = ARGV[3], ARGV[5]
if known[1] then ref, object = known[1], known[2] or ''
else redis.call('HSET', name, 'ref', ref, 'object', object) end
if (tonumber(known[3] or nil) or 0) > 0 then redis.call('PERSIST', name)
else redis.call('PEXPIRE', name, ttl) end
-- The row names the object: a picture that is stored anew as its old object is being removed has a row of its own.
local row = 'input|' .. ARGV[1] .. '|' .. ARGV[2] .. '|' .. object
local due, set = clock_ms() + ttl + 60000, tonumber(redis.call('ZSCORE', key.retention, row) or nil)
if not set or set < due then redis.call('ZADD', key.retention, whole(due), row) end
return ref
