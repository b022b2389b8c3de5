-- Store a new API key. From the first key on the namespace requires keys, even after all are deleted.
-- ARGV     key_id, digest, tenant, scopes, name, ttl_ms
--          `ttl_ms`: '' for a key without an end
-- Returns  {'ok' | 'full', ms of its creation}
local MOST, KEPT_MS = 10000, 2592000000
local now = clock_ms()
local name = key.api_key(ARGV[1])
local known = redis.call('HMGET', name, 'digest', 'created')
if known[1] == ARGV[2] then return {'ok', tonumber(known[2])} end
if redis.call('ZCARD', key.api_keys) >= MOST then
  -- The oldest keys are first, and are the most likely to have expired.
  for _, id in ipairs(redis.call('ZRANGE', key.api_keys, 0, 999)) do
    if redis.call('EXISTS', key.api_key(id)) == 0 then redis.call('ZREM', key.api_keys, id) end
  end
  if redis.call('ZCARD', key.api_keys) >= MOST then return {'full', 0} end
end
redis.call('HSET', name, 'digest', ARGV[2], 'tenant', ARGV[3], 'scopes', ARGV[4], 'name', ARGV[5], 'created', whole(now))
if ARGV[6] ~= '' then
  redis.call('HSET', name, 'expires', whole(now + tonumber(ARGV[6])))
  redis.call('PEXPIRE', name, whole(tonumber(ARGV[6]) + KEPT_MS))
end
redis.call('ZADD', key.api_keys, whole(now), ARGV[1])
redis.call('SET', key.keys_created, 'keys')
return {'ok', now}
