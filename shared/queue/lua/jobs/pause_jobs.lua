-- NEEDS events job_record lane_changes latest_start paused
-- RUNS when Redis is full
-- Pause jobs: queued ones leave their lanes at once; running ones are marked, and do so when their worker has released them.
-- args     job_ids...
-- Returns  the state of each, '' if it is unknown
local now, states, resumed = clock_ms(), {}, false

local function pause(id)
  local job = job_record.load(id)
  if not job then return '' end
  local unfinished = job.state == 'queued' or job.state == 'running'
  -- A worker of an older version queues a paused job in its lane again.
  local done = job.paused and (job.state == 'running' or job.src == 'paused')
  if not unfinished or job.cancel or done then return job.state end
  job.paused = job.paused or whole(now)
  redis.call('HSET', key.job(id), 'paused', job.paused)
  if job.state == 'queued' then
    lane_changes.leave(id, job)
    -- Also of a job for later: the deadline passes on.
    if job.src == 'waiting' and job.deadline then latest_start.set(id, job, now) end
    resumed = tenants.end_reservation(job.tenant, id) and tenants.resume(job.tenant) or resumed
    paused.add(id, job)
    redis.call('HSET', key.job(id), 'event', events.publish(id, job.tenant, 'queued', job.webhook))
  end
  return job.state
end

for at, id in ipairs(args.job_ids) do states[at] = pause(id) end
lane_changes.write(now)
if resumed then wakeups.wake_noted() end
return states
