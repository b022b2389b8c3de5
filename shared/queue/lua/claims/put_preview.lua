-- Store a preview of a job whose epoch is current.
-- ARGV     job_id, epoch, name, file, ttl_ms
-- Returns  1, or 0 if the claim is no longer current
local job = redis.call('HMGET', key.job(ARGV[1]), 'state', 'epoch')
if job[1] ~= 'running' or job[2] ~= ARGV[2] then return 0 end
redis.call('HSET', key.previews(ARGV[1]), ARGV[3], ARGV[4])
redis.call('PEXPIRE', key.previews(ARGV[1]), ARGV[5])
return 1
