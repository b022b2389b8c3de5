-- NEEDS job_state
-- RUNS when Redis is full
-- Cancel a job: a queued one at once; a running one is marked and leaves at its next step.
-- ARGV     job_id
-- Returns  the job's fields and values, empty if unknown
local id, now = ARGV[1], clock_ms()
local job = job_state.load(id)
if job and job.state == 'queued' then
  job_state.leave_queue(id, job)
  redis.call('HSET', key.job(id), 'cancel', 1)
  job_state.finish(id, job, 'canceled', now)
  queue.refresh(job.sig, now)
elseif job and job.state == 'running' then
  redis.call('HSET', key.job(id), 'cancel', 1)
end
return redis.call('HGETALL', key.job(id))
