-- NEEDS job_state
-- Delete the record of a job that has ended. Its pictures were removed by the caller; once no upload of a worker that lost
-- or left it can be under way any more, a sweep looks again.
-- KEYS[1]  prefix
-- ARGV     job_id
-- Returns  1, or 0 when there is no such job or it has not ended
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
