-- RUNS when Redis is full
-- Remove a job from its synchronous calls unless a request has joined it.
-- ARGV     tenant, digest, call, score
--          `call`: 'job process'
-- Returns  1, or 0 when requests have joined since
local name = key.sync_calls(ARGV[1], ARGV[2])
if tonumber(redis.call('ZSCORE', name, ARGV[3])) ~= tonumber(ARGV[4]) then return 0 end
return redis.call('ZREM', name, ARGV[3])
