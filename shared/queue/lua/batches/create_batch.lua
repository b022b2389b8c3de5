-- NEEDS batch_turns
-- Create a batch; idempotent by batch id.
-- args     tenant, batch_id, file_id, max_batches, created_at_ms, fields...
--          `fields`: names and values of the batch
-- Returns  'ok' | 'no_file' | 'full'
local tenant, id, file = args.tenant, args.batch_id, key.file(args.tenant, args.file_id)
if redis.call('EXISTS', key.batch(tenant, id)) == 1 then return 'ok' end
local known = redis.call('HMGET', file, 'purpose', 'expires_at_ms')
if known[1] ~= 'batch' or tonumber(known[2]) <= clock_ms() then return 'no_file' end
-- Remove expired batches from the index.
for _, old_id in ipairs(redis.call('ZRANGE', key.batches(tenant), 0, 99)) do
  if redis.call('EXISTS', key.batch(tenant, old_id)) == 0 then redis.call('ZREM', key.batches(tenant), old_id) end
end
if redis.call('ZCARD', key.batches(tenant)) >= args.max_batches then return 'full' end
redis.call('HSET', key.batch(tenant, id), unpack(args.fields))
redis.call('ZADD', key.batches(tenant), args.created_at_ms, id)
local now = clock_ms()
batch_turns.set_due(tenant, id, now, now, true)
redis.call('HINCRBY', file, 'live', 1)
return 'ok'
