-- NEEDS footprint
-- RUNS when Redis is full
-- Publish a file whose parts are stored; idempotent.
-- ARGV     tenant, file_id, filename, purpose, size, created_at_ms, id_ms, expires_at_ms, parts...
--          `id_ms`: the time in the id, which orders lists: that of a batch's output is earlier than its `created_at_ms`; `parts`: '<bytes> <name>' each; none: they are there already
-- Returns  1, or 0 if its upload was given up
local tenant, id = ARGV[1], ARGV[2]
local row = 'file|' .. tenant .. '|' .. id .. '|'
-- Parts of an upload that is due for deletion can be in deletion already.
if ARGV[9] and tonumber(redis.call('ZSCORE', key.retention, row) or 0) <= clock_ms() then return 0 end
redis.call('HSET', key.file(tenant, id), 'filename', ARGV[3], 'purpose', ARGV[4], 'bytes', ARGV[5],
  'created_at_ms', ARGV[6], 'expires_at_ms', ARGV[8])
if ARGV[9] then
  local name = key.file_parts(tenant, id)
  local before = footprint.of_parts(redis.call('LRANGE', name, 0, -1))
  redis.call('DEL', name)
  for at = 9, #ARGV do redis.call('RPUSH', name, ARGV[at]) end
  footprint.change(tenant, before, footprint.of_parts({unpack(ARGV, 9)}))
end
redis.call('ZADD', key.files(tenant), ARGV[7], id)
redis.call('ZADD', key.retention, ARGV[8], row)
return 1
