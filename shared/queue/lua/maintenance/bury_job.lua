-- NEEDS job_record dead_letters job_state
-- RUNS when Redis is full
-- Add a job that has ended to the dead letters, and keep it as long as its letter.
-- args     job_id, reason, detail
-- Returns  1
local id, now = args.job_id, clock_ms()
local job = job_record.load(id)
dead_letters.bury(id, args.reason, args.detail, now)
if job and job.state ~= 'queued' and job.state ~= 'running' then job_state.keep(id, job, conf.dead_ms, now) end
return 1
