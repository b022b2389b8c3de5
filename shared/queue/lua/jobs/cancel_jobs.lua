-- NEEDS job_record job_state lane_changes
-- RUNS when Redis is full
-- Cancel jobs: queued ones at once; running ones are marked and leave at their next step.
-- args     job_ids...
-- Returns  the state of each: 'canceled', 'running' if it is marked, another one if it has ended, '' if it is unknown
local now, states, resumed = clock_ms(), {}, false

local function cancel(id)
  local job = job_record.load(id)
  if not job then return '' end
  if job.state ~= 'queued' and job.state ~= 'running' then return job.state end
  redis.call('HSET', key.job(id), 'cancel', 1)
  if job.state == 'running' then return 'running' end
  lane_changes.leave(id, job)
  resumed = tenants.end_reservation(job.tenant, id) and tenants.resume(job.tenant) or resumed
  job_state.finish(id, job, 'canceled', now)
  return 'canceled'
end

for at, id in ipairs(args.job_ids) do states[at] = cancel(id) end
lane_changes.write(now)
if resumed then wakeups.wake_noted() end
return states
