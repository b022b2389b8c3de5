-- Reserve an idempotency key for an object that is created next. A known key keeps its object; a new one counts like those
-- of jobs.
-- ARGV     tenant, digest, object_id, fingerprint
-- Returns  {'ok' | 'mismatch' | 'quota', id of the key's object | name of the quota that is used up}
local name, counter = key.idempotency(ARGV[1], ARGV[2]), key.idempotency_keys(ARGV[1])
local known = redis.call('GET', name)
if known then
  local id, fingerprint = string.match(known, '^(%S+) (.*)$')
  return {fingerprint == ARGV[4] and 'ok' or 'mismatch', id}
end
local count = redis.call('INCR', counter)
if count == 1 then redis.call('PEXPIRE', counter, conf.idempotency_ms) end
if count > conf.idempotency_keys then return {'quota', 'idempotency_keys'} end
redis.call('SET', name, ARGV[3] .. ' ' .. ARGV[4], 'PX', conf.idempotency_ms)
return {'ok', ARGV[3]}
