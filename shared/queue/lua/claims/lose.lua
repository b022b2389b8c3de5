-- NEEDS job_record job_state
-- RUNS when Redis is full
-- Give up the claims of a worker that cannot continue, like expired leases, but at once and with the cause.
-- args     worker, cause, claims...
-- Returns  how many were still this worker's
local worker, now, count, touched = args.worker, clock_ms(), 0, {}
for _, claim in ipairs(args.claims) do
  local job = job_record.load(claim.job_id)
  if job and job.state == 'running' and job.worker == worker and tonumber(job.epoch) == claim.epoch then
    job_state.lost(claim.job_id, job, now, args.cause)
    touched[job.sig] = true
    count = count + 1
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if count > 0 then queue.wake() end
return count
