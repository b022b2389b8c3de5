-- Keep a new API key. From the first one on, keys are asked for: that stays so when all of them are gone again.
-- KEYS[1]  prefix
-- ARGV     id, digest, tenant, scopes, name, ms it lives | ''
-- Returns  {'ok' | 'full', ms when it was made}
local MOST, KEPT_MS = 10000, 2592000000
local now = clock_ms()
if redis.call('ZCARD', key.apikeys) >= MOST then
  -- The oldest come first, and are the likeliest to be gone.
  for _, id in ipairs(redis.call('ZRANGE', key.apikeys, 0, 999)) do
    if redis.call('EXISTS', key.apikey(id)) == 0 then redis.call('ZREM', key.apikeys, id) end
  end
  if redis.call('ZCARD', key.apikeys) >= MOST then return {'full', 0} end
end
local name = key.apikey(ARGV[1])
redis.call('HSET', name, 'digest', ARGV[2], 'tenant', ARGV[3], 'scopes', ARGV[4], 'name', ARGV[5], 'created', whole(now))
if ARGV[6] ~= '' then
  redis.call('HSET', name, 'expires', whole(now + tonumber(ARGV[6])))
  redis.call('PEXPIRE', name, whole(tonumber(ARGV[6]) + KEPT_MS))
end
redis.call('ZADD', key.apikeys, whole(now), ARGV[1])
redis.call('SET', key.auth, 'keys')
return {'ok', now}
