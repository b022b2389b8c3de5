-- Store a preview of a job whose epoch is current.
-- args     job_id, epoch, name, file, ttl_ms
-- Returns  1, or 0 if the claim is no longer current
local job = redis.call('HMGET', key.job(args.job_id), 'state', 'epoch')
if job[1] ~= 'running' or tonumber(job[2]) ~= args.epoch then return 0 end
redis.call('HSET', key.previews(args.job_id), args.name, args.file)
redis.call('PEXPIRE', key.previews(args.job_id), args.ttl_ms)
return 1
