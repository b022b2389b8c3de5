-- Batches that are to be looked at, each put off for as long as a look may take.
-- KEYS[1]  prefix
-- ARGV     how many at most, ms until they are due again
-- Returns  'tenant|id' for each
local now = clock_ms()
local due = redis.call('ZRANGEBYSCORE', key.backfills, '-inf', whole(now), 'LIMIT', 0, ARGV[1])
for _, one in ipairs(due) do redis.call('ZADD', key.backfills, whole(now + tonumber(ARGV[2])), one) end
return due
