-- NEEDS job_state
-- Delete the record of a job that has ended and whose objects are deleted. A sweep looks again when no upload of a worker
-- without a lease can still be in progress.
-- ARGV     job_id
-- Returns  1, or 0 for an unknown or unfinished job
local id = ARGV[1]
local job = job_state.load(id)
if not job or job.state == 'queued' or job.state == 'running' then return 0 end
redis.call('DEL', key.job(id), key.dead_letter(id))
redis.call('ZREM', key.dead_letters, id)
redis.call('ZREM', key.jobs(job.tenant), id)
redis.call('ZREM', key.videos(job.tenant), id)
if job.batch then redis.call('ZREM', key.batch_jobs(job.tenant, job.batch), id) end
redis.call('ZADD', key.retention, whole(clock_ms() + conf.lease_ms + 60000), job_state.row(job.tenant, id, job.batch))
return 1
