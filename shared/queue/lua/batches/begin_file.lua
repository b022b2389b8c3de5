-- Schedule the deletion of a file's parts before they are stored; file_put cancels it.
-- ARGV     tenant, file_id, max_files, remove_after_ms
-- Returns  'ok' | 'full'
local tenant, id = ARGV[1], ARGV[2]
if redis.call('ZCARD', key.files(tenant)) >= tonumber(ARGV[3]) then return 'full' end
redis.call('ZADD', key.retention, whole(clock_ms() + tonumber(ARGV[4])), 'file|' .. tenant .. '|' .. id .. '|')
return 'ok'
