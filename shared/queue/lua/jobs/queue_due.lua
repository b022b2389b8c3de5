-- NEEDS events job_record lane_changes later latest_start parents queue tenants wakeups
-- RUNS when Redis is full
-- Queue jobs for later that are due, first those that were due first: they arrive in their lanes when they were due. Then tell
-- jobs of the ends of those that they wait for, however many, and queue those that are due by that.
-- args     limit
-- Returns  how many were told or due
local now, arrivals = clock_ms(), {}

local function arrive(id, job)
  local own = redis.call('HMGET', key.job(id), 'window', 'max_batch')
  lane_changes.leave(id, job)
  later.forget(id, job)
  if job.deadline then latest_start.set(id, job, now) end
  lane_changes.arrive(id, job, tonumber(job.wait_until))
  redis.call('HSET', key.job(id), 'event', events.publish(id, job.tenant, 'queued', job.webhook))
  local known = arrivals[job.sig] or {}
  known.model, known.window, known.max_batch = job.model, own[1] or '0', own[2] or job.slots
  -- A tenant at its quota wakes no worker.
  known.free = known.free or not tenants.is_deferred(job.tenant, job.model, job.rank)
  arrivals[job.sig] = known
end

-- Queue up to `most` jobs that are due, and return how many.
local function queue_some(most)
  local due = redis.call('ZRANGEBYSCORE', key.later, '-inf', whole(now), 'LIMIT', 0, most)
  for _, id in ipairs(due) do
    local job = job_record.load(id)
    if job and job.state == 'queued' and job.src == 'waiting' then
      arrive(id, job)
    else
      redis.call('ZREM', key.later, id)
    end
  end
  return #due
end

local done = queue_some(args.limit)
local told = parents.tell_children(args.limit - done, now)
done = done + told + queue_some(told > 0 and args.limit - done - told or 0)
for sig, one in pairs(arrivals) do
  redis.call('HSET', key.signature(sig), 'model', one.model, 'window', one.window, 'batch', one.max_batch)
end
lane_changes.write()
for sig, one in pairs(arrivals) do
  queue.record_arrival(sig, tonumber(one.window), now)
  local wake = queue.refresh(sig, now, true)
  if wake and one.free then wakeups.wake(sig, 0) end
end
return done
