-- NEEDS events groups job_record job_state later latest_start paused
-- RUNS when Redis is full
-- End the pauses of jobs: those that are queued go back to their lanes, before later ones; running ones lose their mark.
-- args     job_ids...
-- Returns  the state of each, '' if it is unknown
local now, states, touched = clock_ms(), {}, {}

-- Let a job for later wait on until it is due.
local function wait(id, job)
  latest_start.clear(id, job)
  later.add(id, job)
  groups.note(id, job, 'queued', now)
  redis.call('HSET', key.job(id), 'event', events.publish(id, job.tenant, 'queued', job.webhook))
  return job.state
end

local function resume(id)
  local job = job_record.load(id)
  if not job then return '' end
  if not job.paused then return job.state end
  redis.call('HDEL', key.job(id), 'paused')
  job.paused = nil
  if job.state == 'queued' and job.src == 'paused' then
    paused.remove(id, job)
    if later.waits(job, now) then return wait(id, job) end
    if job.wait_until then later.forget(id, job) end
    job_state.requeue(id, job, job.solo and 'solo' or 'dated', now)
    touched[job.sig] = true
  end
  return job.state
end

for at, id in ipairs(args.job_ids) do states[at] = resume(id) end
for sig in pairs(touched) do queue.refresh(sig, now) end
if next(touched) then wakeups.wake_noted() end
return states
