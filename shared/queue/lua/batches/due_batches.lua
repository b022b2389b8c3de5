-- RUNS when Redis is full
-- Claim due batches; each is due again after the duration of a step.
-- ARGV     limit, again_ms
-- Returns  'tenant|id' for each
local now = clock_ms()
local LONGEST_MS = 60000 -- longer than any step: a later time was written before the clock was set back
for _, row in ipairs(redis.call('ZRANGEBYSCORE', key.active_batches, whole(now + LONGEST_MS), '+inf', 'LIMIT', 0, ARGV[1])) do
  redis.call('ZADD', key.active_batches, whole(now), row)
end
local due = redis.call('ZRANGEBYSCORE', key.active_batches, '-inf', whole(now), 'LIMIT', 0, ARGV[1])
for _, row in ipairs(due) do redis.call('ZADD', key.active_batches, whole(now + tonumber(ARGV[2])), row) end
return due
