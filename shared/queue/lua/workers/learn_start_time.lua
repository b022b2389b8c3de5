-- RUNS when Redis is full
-- Add a worker's start time to a moving mean, kept for a week.
-- args     seconds
-- Returns  1
local seconds = args.seconds
local mean = tonumber(redis.call('GET', key.worker_start_s) or nil)
if mean then seconds = mean + 0.3 * (seconds - mean) end
redis.call('SET', key.worker_start_s, string.format('%.6g', seconds), 'PX', 7 * 86400000)
return 1
