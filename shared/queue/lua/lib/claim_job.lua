-- NEEDS job_state
-- Part of claim and join: one job enters the batch `b` of a worker, or does not.

local claim_job = {}
local HOLD_BACK_MS = 60000
local UNKNOWN_SLOT_S = 1

-- Seconds that a slot of the batch is expected to cost.
local function slot_cost(b)
  b.slot_cost = b.slot_cost or tonumber(redis.call('HGET', key.slot_cost(b.sig), 'slot_s') or
    redis.call('HGET', key.slot_cost('model|' .. b.model), 'slot_s') or nil) or UNKNOWN_SLOT_S
  return b.slot_cost
end

-- Claim a job for the worker b.worker. Counters and charges are collected in `b` and written once per batch.
function claim_job.take(b, id, job)
  local name = key.job(id)
  local epoch, cost = (tonumber(job.epoch) or 0) + 1, slot_cost(b) * job.slots
  redis.call('HSET', name, 'state', 'running', 'worker', b.worker, 'started', whole(b.now), 'epoch', epoch,
    'attempts', (tonumber(job.attempts) or 0) + 1, 'charged', string.format('%.9g', cost),
    'event', job_state.event(id, job.tenant, 'running', job.webhook))
  if job.returned or job.passed then redis.call('HDEL', name, 'returned', 'passed') end
  if job.deadline then redis.call('ZREM', key.deadlines, id) end
  table.insert(b.leases, whole(b.now + conf.lease_ms))
  table.insert(b.leases, id)
  local group = job.rank .. '|' .. job.tenant
  if not b.taken[group] then b.taken[group] = {rank = job.rank, tenant = job.tenant, jobs = 0, slots = 0} end
  b.taken[group].jobs = b.taken[group].jobs + 1
  b.taken[group].slots = b.taken[group].slots + job.slots
  b.spent[job.tenant] = (b.spent[job.tenant] or 0) + cost
  b.left = b.left - job.slots
  quota.use(b, job.tenant, job.slots)
  local waited = math.max(0, math.floor(b.now - (tonumber(job.arrived) or b.now)))
  table.insert(b.claims, {id, job.job or '', job.sig, epoch, job.solo and 1 or 0, waited,
    job_state.time_left(job, b.now)})
end

-- Write the counters that the claims of a batch have changed.
function claim_job.count(b)
  if not b.claims[1] then return end
  local left, running = {}, {}
  for _, group in pairs(b.taken) do
    table.insert(left, {rank = group.rank, tenant = group.tenant, jobs = -group.jobs, slots = -group.slots})
    running[group.tenant] = (running[group.tenant] or 0) + group.slots
  end
  queue.count_all(b.sig, left)
  for tenant, slots in pairs(running) do queue.count_running(tenant, slots) end
  redis.call('HINCRBY', key.claimed_jobs, b.worker, #b.claims)
  redis.call('HINCRBY', key.signature(b.sig), 'running', #b.claims)
  queue.add_all(key.leases, b.leases)
  tenants.charge(b.spent, b.now)
end

-- Skip a job that needs more slots than are left: it leads its tenant's jobs in the next batch.
function claim_job.skip(b, id)
  redis.call('HSETNX', key.job(id), 'passed', whole(b.now))
  redis.call('HSETNX', key.job(id), 'returned', whole(b.now))
end

-- Whether to keep slots free for a skipped job: it is overdue, slots of this worker will become free, and it has not held
-- others back for HOLD_BACK_MS.
function claim_job.reserves_slots(id, worker, now)
  local passed = tonumber(redis.call('HGET', key.job(id), 'passed') or nil)
  if passed and passed > now then -- the clock was set back
    redis.call('HSET', key.job(id), 'passed', whole(now))
    return false
  end
  if not passed or now - passed < conf.overdue_ms or now - passed > conf.overdue_ms + HOLD_BACK_MS then return false end
  return (tonumber(redis.call('HGET', key.claimed_jobs, worker) or 0) or 0) > 0
end

-- Expire a queued job whose deadline has passed, and count it in b.expired; returns whether it has.
function claim_job.expired(b, id, job)
  local now = b.now
  if not (job.deadline and tonumber(job.deadline) <= now) then return false end
  b.expired = b.expired + 1
  job_state.leave_queue(id, job)
  job_state.finish(id, job, 'expired', now)
  return true
end
