-- NEEDS job_record job_state
-- RUNS when Redis is full
-- Return unfinished jobs to the front of the queue without counting an attempt or a loss.
-- args     worker, claims...
-- Returns  how many were still this worker's
local worker, now, count, touched = args.worker, clock_ms(), 0, {}
for _, claim in ipairs(args.claims) do
  local job = job_record.load(claim.job_id)
  if job and job.state == 'running' and job.worker == worker and tonumber(job.epoch) == claim.epoch then
    job_state.release(claim.job_id, job, now)
    touched[job.sig] = true
    count = count + 1
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if count > 0 then queue.wake() end
return count
