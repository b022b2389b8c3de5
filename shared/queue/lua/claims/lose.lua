-- NEEDS job_state
-- RUNS when Redis is full
-- Give up the claims of a worker that cannot continue, like expired leases, but at once and with the cause.
-- ARGV     worker, cause, claims...
--          `claims`: pairs of job id and epoch
-- Returns  how many were still this worker's
local worker, now, count, touched = ARGV[1], clock_ms(), 0, {}
for at = 3, #ARGV, 2 do
  local job = job_state.load(ARGV[at])
  if job and job.state == 'running' and job.worker == worker and job.epoch == ARGV[at + 1] then
    job_state.lost(ARGV[at], job, now, ARGV[2])
    touched[job.sig] = true
    count = count + 1
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if count > 0 then queue.wake() end
return count
