-- Let an API key be good for nothing from now on. Its record stays for a while, so that people see what became of it.
-- KEYS[1]  prefix
-- ARGV     key_id
-- Returns  1, or 0 when there is no such key
local KEPT_MS = 2592000000
local name = key.api_key(ARGV[1])
if redis.call('EXISTS', name) == 0 then return 0 end
redis.call('HSETNX', name, 'revoked', whole(clock_ms()))
redis.call('PEXPIRE', name, KEPT_MS)
return 1
