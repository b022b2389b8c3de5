-- NEEDS job_record job_state
-- RUNS when Redis is full
-- Give up claims. With a cause, that of a worker that cannot continue, they are lost, like expired leases, but at once. Without
-- one unfinished jobs return to the front of the queue, and no attempt or loss is counted.
-- args     worker, cause, claims...
-- Returns  how many were still this worker's
local worker, now, count, touched = args.worker, clock_ms(), 0, {}
for _, claim in ipairs(args.claims) do
  local job = job_record.load(claim.job_id)
  if job and job.state == 'running' and job.worker == worker and tonumber(job.epoch) == claim.epoch then
    if args.cause then job_state.lost(claim.job_id, job, now, args.cause) else job_state.release(claim.job_id, job, now) end
    touched[job.sig] = true
    count = count + 1
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if count > 0 then wakeups.wake_noted() end
return count
