-- NEEDS footprint
-- Schedule the deletion of a file's parts before they are stored; put_file cancels it.
-- args     tenant, file_id, max_files, remove_after_ms, size
--          `size`: bytes to be stored, counted at once; 0 for a file of the service: its parts are counted when committed
-- Returns  'ok', 'full' or the name of the quota that is used up
local tenant, id, size = args.tenant, args.file_id, args.size
local parts = key.file_parts(tenant, id)
if redis.call('ZCARD', key.files(tenant)) >= args.max_files then return 'full' end
if size > 0 and redis.call('EXISTS', parts) == 0 then
  local row = whole(size) .. ' reserved'
  local counted = footprint.of_parts({row})
  local quota = footprint.exceeded(footprint.read(tenant), footprint.numbers(counted))
  if quota then return quota end
  redis.call('RPUSH', parts, row)
  footprint.change(tenant, '', counted)
end
redis.call('ZADD', key.retention, whole(clock_ms() + args.remove_after_ms), 'file|' .. tenant .. '|' .. id .. '|')
return 'ok'
