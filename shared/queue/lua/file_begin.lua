-- Note that parts of a file are about to be stored, so that they are removed should nothing come of it.
-- KEYS[1]  prefix
-- ARGV     tenant, file id, most files of a tenant, ms until what is stored is removed
-- Returns  'ok' | 'full'
local tenant, id = ARGV[1], ARGV[2]
if redis.call('ZCARD', key.files(tenant)) >= tonumber(ARGV[3]) then return 'full' end
redis.call('ZADD', key.retention, whole(clock_ms() + tonumber(ARGV[4])), 'file|' .. tenant .. '|' .. id .. '|')
return 'ok'
