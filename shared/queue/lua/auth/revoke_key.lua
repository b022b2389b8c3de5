-- RUNS when Redis is full
-- Revoke an API key. Its record is kept for a while, for operators.
-- args     key_id
-- Returns  1, or 0 for an unknown key
local KEPT_MS = 2592000000
local name = key.api_key(args.key_id)
if redis.call('EXISTS', name) == 0 then return 0 end
redis.call('HSETNX', name, 'revoked', whole(clock_ms()))
redis.call('PEXPIRE', name, KEPT_MS)
return 1
