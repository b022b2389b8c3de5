-- Reserve an idempotency key for an object that is created next. A known key keeps its object; a new one counts like those
-- of jobs.
-- args     tenant, digest, object_id, fingerprint
-- Returns  {'ok' | 'mismatch' | 'quota', id of the key's object | name of the quota that is used up}
local name, counter = key.idempotency(args.tenant, args.digest), key.idempotency_keys(args.tenant)
local known = redis.call('GET', name)
if known then
  local id, fingerprint = string.match(known, '^(%S+) (.*)$')
  return {fingerprint == args.fingerprint and 'ok' or 'mismatch', id}
end
local count = redis.call('INCR', counter)
if count == 1 then redis.call('PEXPIRE', counter, conf.idempotency_ms) end
if count > conf.idempotency_keys then return {'quota', 'idempotency_keys'} end
redis.call('SET', name, args.object_id .. ' ' .. args.fingerprint, 'PX', conf.idempotency_ms)
return {'ok', args.object_id}
