-- NEEDS footprint
-- RUNS when Redis is full
-- Publish a file whose parts are stored; idempotent.
-- args     tenant, file_id, filename, purpose, size, created_at_ms, id_ms, expires_at_ms, parts...
--          `id_ms`: the time in the id, which orders lists: that of a batch's output is earlier than its `created_at_ms`;
--          `parts`: '<bytes> <name>' each; none: they are there already
-- Returns  1, or 0 if its upload was given up
local tenant, id = args.tenant, args.file_id
local row = 'file|' .. tenant .. '|' .. id .. '|'
-- Parts of an upload that is due for deletion can be in deletion already.
if args.parts[1] and tonumber(redis.call('ZSCORE', key.retention, row) or 0) <= clock_ms() then return 0 end
redis.call('HSET', key.file(tenant, id), 'filename', args.filename, 'purpose', args.purpose, 'bytes', args.size,
  'created_at_ms', args.created_at_ms, 'expires_at_ms', args.expires_at_ms)
if args.parts[1] then
  local name = key.file_parts(tenant, id)
  local before = footprint.of_parts(redis.call('LRANGE', name, 0, -1))
  redis.call('DEL', name)
  for _, part in ipairs(args.parts) do redis.call('RPUSH', name, part) end
  footprint.change(tenant, before, footprint.of_parts(args.parts))
end
redis.call('ZADD', key.files(tenant), args.id_ms, id)
redis.call('ZADD', key.retention, args.expires_at_ms, row)
return 1
