-- NEEDS job_state
-- RUNS when Redis is full
-- Return unfinished jobs to the front of the queue without counting an attempt or a loss.
-- ARGV     worker, claims...
--          `claims`: pairs of job id and epoch
-- Returns  how many were still this worker's
local worker, now, count, touched = ARGV[1], clock_ms(), 0, {}
for at = 2, #ARGV, 2 do
  local job = job_state.load(ARGV[at])
  if job and job.state == 'running' and job.worker == worker and job.epoch == ARGV[at + 1] then
    job_state.release(ARGV[at], job, now)
    touched[job.sig] = true
    count = count + 1
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if count > 0 then queue.wake() end
return count
