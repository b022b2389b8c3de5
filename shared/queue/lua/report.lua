-- Note what a running job is doing, if the epoch is still current, and tell all who listen.
-- KEYS[1]  prefix
-- ARGV     job id, epoch, phase, step, total, the message for those who listen
-- Returns  1, or 0 when the claim is no longer current
local name = key.job(ARGV[1])
local job = redis.call('HMGET', name, 'state', 'epoch')
if job[1] ~= 'running' or job[2] ~= ARGV[2] then return 0 end
redis.call('HSET', name, 'phase', ARGV[3], 'step', ARGV[4], 'total', ARGV[5])
redis.call('PUBLISH', key.progress, ARGV[6])
return 1
