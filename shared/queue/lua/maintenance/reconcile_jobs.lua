-- NEEDS job_record job_state
-- RUNS when Redis is full
-- Repair jobs that are not where their state says.
-- args     job_ids...
-- Returns  how many were repaired
local now, repaired, touched = clock_ms(), 0, {}

local function is_queued(id, job)
  if job.src == 'lane' then
    local lane = key.lane(job.sig, job.rank, job.tenant)
    return (job.entry or '') ~= '' and redis.call('XRANGE', lane, job.entry, job.entry)[1] ~= nil
  end
  local standing = redis.call('ZSCORE', queue.set_of(job), id)
  return standing and redis.call('ZSCORE', key.returned(job.sig, job.rank, job.tenant), id) and true or false
end

local function requeue(id, job)
  local counted = tonumber(redis.call('HGET', key.signature(job.sig), 'jobs:' .. job.rank) or nil) or 0
  if counted > 0 then queue.count(job.sig, job.rank, job.tenant, -1, -job.slots) end -- where it should have stood
  if job.src == 'lane' then queue.remove_entry(key.lane(job.sig, job.rank, job.tenant), job.entry) end
  job_state.requeue(id, job, job.solo and 'solo' or job.src == 'dated' and 'dated' or 'front', now)
  touched[job.sig] = true
end

for _, id in ipairs(args.job_ids) do
  local state = redis.call('HGET', key.job(id), 'state')
  local job = (state == 'queued' or state == 'running') and job_record.load(id) -- most jobs have ended
  if job and job.state == 'queued' then
    if not is_queued(id, job) then
      requeue(id, job)
      repaired = repaired + 1
    else
      repaired = repaired + latest_start.list(id, job, now)
      -- Counters of the signature are repaired after all jobs and lanes.
      repaired = repaired + redis.call('HSETNX', key.signature(job.sig), 'model', job.model)
      -- The orders of a lane with entries are repaired with the lane.
      if job.src ~= 'lane' then
        repaired = repaired + queue.update_lane(job, queue.head(key.lane(job.sig, job.rank, job.tenant)))
      end
    end
  elseif job and job.state == 'running' then
    -- Its worker can be alive: then it renews this lease; otherwise the lease expires.
    if redis.call('ZADD', key.leases, 'NX', whole(now + conf.lease_ms), id) == 1 then repaired = repaired + 1 end
  elseif redis.call('PTTL', key.job(id)) == -1 then
    redis.call('PEXPIRE', key.job(id), conf.retention_ms)
    repaired = repaired + 1
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if repaired > 0 then queue.wake() end
return repaired
