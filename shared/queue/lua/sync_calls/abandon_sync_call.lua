-- RUNS when Redis is full
-- Remove a job from its synchronous calls unless a request has joined it.
-- ARGV     tenant, digest, job_id, score
-- Returns  1, or 0 when requests wait or have joined since
local name = key.sync_calls(ARGV[1], ARGV[2])
local score = tonumber(redis.call('ZSCORE', name, ARGV[3]))
-- The score modulo 1000, from -500: below 0 when a request left twice.
if score ~= tonumber(ARGV[4]) or (score + 500) % 1000 - 500 > 0 then return 0 end
return redis.call('ZREM', name, ARGV[3])
