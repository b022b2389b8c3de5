-- NEEDS job_state
-- Part of claim and join: one job enters the batch of a worker, or does not. fill.lua lists the fields of `batch`.

local claim_job = {}
local HOLD_BACK_MS = 60000
local UNKNOWN_SLOT_S = 1
local REMOVED = 32 -- jobs of a claim that lose their place; ending one takes about 25 commands

-- Seconds that a slot of the batch is expected to cost.
local function slot_cost(batch)
  batch.slot_cost = batch.slot_cost or tonumber(redis.call('HGET', key.slot_cost(batch.sig), 'slot_s') or
    redis.call('HGET', key.slot_cost('model|' .. batch.model), 'slot_s') or nil) or UNKNOWN_SLOT_S
  return batch.slot_cost
end

-- Claim a job for the worker batch.worker. Counters and charges are collected in `batch` and written once per batch.
function claim_job.take(batch, id, job)
  local name = key.job(id)
  local epoch, cost = (tonumber(job.epoch) or 0) + 1, slot_cost(batch) * job.slots
  redis.call('HSET', name, 'state', 'running', 'worker', batch.worker, 'started', whole(batch.now), 'epoch', epoch,
    'attempts', (tonumber(job.attempts) or 0) + 1, 'charged', string.format('%.9g', cost),
    'event', job_state.event(id, job.tenant, 'running', job.webhook))
  if job.returned or job.passed then redis.call('HDEL', name, 'returned', 'passed') end
  latest_start.unlist(id, job)
  table.insert(batch.leases, whole(batch.now + conf.lease_ms))
  table.insert(batch.leases, id)
  local group = job.rank .. '|' .. job.tenant
  if not batch.taken[group] then batch.taken[group] = {rank = job.rank, tenant = job.tenant, jobs = 0, slots = 0} end
  batch.taken[group].jobs = batch.taken[group].jobs + 1
  batch.taken[group].slots = batch.taken[group].slots + job.slots
  batch.spent[job.tenant] = (batch.spent[job.tenant] or 0) + cost
  batch.left = batch.left - job.slots
  quota.use(batch, job.tenant, job.slots)
  local waited = math.max(0, math.floor(batch.now - (tonumber(job.arrived) or batch.now)))
  table.insert(batch.claims, {id, job.job or '', job.sig, epoch, job.solo and 1 or 0, waited,
    job_state.time_left(job, batch.now), job_state.slack(job, batch.now)})
end

-- Write the counters that the claims of a batch have changed.
function claim_job.count(batch)
  if not batch.claims[1] then return end
  local left, running = {}, {}
  for _, group in pairs(batch.taken) do
    table.insert(left, {rank = group.rank, tenant = group.tenant, jobs = -group.jobs, slots = -group.slots})
    running[group.tenant] = (running[group.tenant] or 0) + group.slots
  end
  queue.count_all(batch.sig, left)
  for tenant, slots in pairs(running) do queue.count_running(tenant, slots) end
  redis.call('HINCRBY', key.claimed_jobs, batch.worker, #batch.claims)
  redis.call('HINCRBY', key.signature(batch.sig), 'running', #batch.claims)
  queue.add_all(key.leases, batch.leases)
  tenants.charge(batch.spent, batch.now)
end

-- Whether a job fits into the batch. As the first one of a worker without jobs it can fill all of the worker's slots:
-- `max_batch` of a signature is that of its last submit, which can be of another size than this job.
function claim_job.fits(batch, slots)
  return slots <= batch.left or (batch.most and not batch.claims[1] and slots <= batch.most) or false
end

-- Skip a job that needs more slots than are left: it leads its tenant's jobs in the next batch. The job's field `passed`
-- is when it was first skipped since its last claim.
function claim_job.skip(batch, id)
  redis.call('HSETNX', key.job(id), 'passed', whole(batch.now))
  redis.call('HSETNX', key.job(id), 'returned', whole(batch.now))
end

-- Whether to keep slots free for a skipped job: it is overdue, slots of this worker will become free, and it has not held
-- others back for HOLD_BACK_MS.
function claim_job.reserves_slots(id, worker, now)
  local skipped_at = tonumber(redis.call('HGET', key.job(id), 'passed') or nil)
  if skipped_at and skipped_at > now then -- the clock was set back
    redis.call('HSET', key.job(id), 'passed', whole(now))
    return false
  end
  if not skipped_at then return false end
  local waited = now - skipped_at
  if waited < conf.overdue_ms or waited > conf.overdue_ms + HOLD_BACK_MS then return false end
  return (tonumber(redis.call('HGET', key.claimed_jobs, worker) or 0) or 0) > 0
end

-- Whether a claim has removed as many jobs from their place as one may.
function claim_job.has_removed_most(batch) return batch.removed >= REMOVED end

-- Whether a queued job goes by a latest start that has passed, or can no longer meet its deadline.
function claim_job.loses_place(batch, job)
  return latest_start.is_missed(job, batch.now) or (job.src == 'dated' and job_state.slack(job, batch.now) < 0)
end

-- Expire such a job, or let it go last in its lane while it can meet its deadline, and count it in batch.removed.
function claim_job.remove(batch, id, job)
  batch.removed = batch.removed + 1
  if latest_start.is_missed(job, batch.now) then return job_state.expire(id, job, batch.now) end
  job_state.become_late(id, job, batch.now)
end

-- Remove a queued job from its place if it loses it; returns whether it does.
function claim_job.removed(batch, id, job)
  if not claim_job.loses_place(batch, job) then return false end
  claim_job.remove(batch, id, job)
  return true
end
