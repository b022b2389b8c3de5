-- NEEDS job_state
-- RUNS when Redis is full
-- Add a job that has ended to the dead letters, and keep it as long as its letter.
-- ARGV     job_id, reason, detail
-- Returns  1
local id, now = ARGV[1], clock_ms()
local job = job_state.load(id)
job_state.bury(id, ARGV[2], ARGV[3], now)
if job and job.state ~= 'queued' and job.state ~= 'running' then job_state.keep(id, job, conf.dead_ms, now) end
return 1
