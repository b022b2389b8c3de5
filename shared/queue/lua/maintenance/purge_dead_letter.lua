-- NEEDS job_state
-- Delete a dead letter and its job's record; the job's objects are due for deletion at once.
-- ARGV     letter_id
-- Returns  1, or 0 for an unknown dead letter
local id = ARGV[1]
if redis.call('ZREM', key.dead_letters, id) == 0 then return 0 end
redis.call('DEL', key.dead_letter(id))
local job = job_state.load(id)
if job and job.state ~= 'queued' and job.state ~= 'running' then
  redis.call('DEL', key.job(id))
  redis.call('ZREM', key.jobs(job.tenant), id)
  redis.call('ZREM', key.videos(job.tenant), id)
  if job.batch then redis.call('ZREM', key.batch_jobs(job.tenant, job.batch), id) end
  redis.call('ZADD', key.retention, whole(clock_ms()), job_state.row(job.tenant, id, job.batch))
end
return 1
