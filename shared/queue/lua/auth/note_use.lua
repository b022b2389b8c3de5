-- RUNS when Redis is full
-- Record the use of an API key, at most once a minute.
-- args     key_id
-- Returns  1
local EVERY_MS = 60000
local name, now = key.api_key(args.key_id), clock_ms()
local known = redis.call('HMGET', name, 'digest', 'used')
if known[1] and not (known[2] and now - tonumber(known[2]) < EVERY_MS) then redis.call('HSET', name, 'used', whole(now)) end
return 1
