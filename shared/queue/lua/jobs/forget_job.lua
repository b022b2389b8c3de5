-- NEEDS job_record
-- RUNS when Redis is full
-- Delete the record of a job that has ended and whose objects are deleted. A sweep looks again when no upload of a worker
-- without a lease can still be in progress.
-- args     job_id
-- Returns  1, or 0 for an unknown or unfinished job
local id = args.job_id
local job = job_record.load(id)
if not job or job.state == 'queued' or job.state == 'running' then return 0 end
job_record.forget(id, job, clock_ms() + conf.lease_ms + 60000)
return 1
