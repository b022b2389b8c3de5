-- Store a new API key. From the first key on the namespace requires keys, even after all are deleted.
-- args     key_id, digest, tenant, scopes, name, ttl_ms
--          `ttl_ms`: '' for a key without an end
-- Returns  {'ok' | 'full', ms of its creation}
local MOST, KEPT_MS = 10000, 2592000000
local now = clock_ms()
local name = key.api_key(args.key_id)
local known = redis.call('HMGET', name, 'digest', 'created')
if known[1] == args.digest then return {'ok', tonumber(known[2])} end
if redis.call('ZCARD', key.api_keys) >= MOST then
  -- The oldest keys are first, and are the most likely to have expired.
  for _, id in ipairs(redis.call('ZRANGE', key.api_keys, 0, 999)) do
    if redis.call('EXISTS', key.api_key(id)) == 0 then redis.call('ZREM', key.api_keys, id) end
  end
  if redis.call('ZCARD', key.api_keys) >= MOST then return {'full', 0} end
end
redis.call('HSET', name, 'digest', args.digest, 'tenant', args.tenant, 'scopes', args.scopes, 'name', args.name,
  'created', whole(now))
if args.ttl_ms then
  redis.call('HSET', name, 'expires', whole(now + args.ttl_ms))
  redis.call('PEXPIRE', name, whole(args.ttl_ms + KEPT_MS))
end
redis.call('ZADD', key.api_keys, whole(now), args.key_id)
redis.call('SET', key.keys_created, 'keys')
return {'ok', now}
