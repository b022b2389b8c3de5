-- NEEDS job_record events lane_changes latest_start queue tenants groups
-- Part of read_lanes and take: one job enters the batch of a worker, or does not.

local claim_job = {}
local UNKNOWN_SLOT_S = 1

-- The claims of one signature by a worker. Written by `take`: claims, rows of the reply; running, slots by tenant;
-- of_rank, slots by rank; leases, rows of key.leases; spent, seconds to charge by tenant; limits as in `quota`.
function claim_job.batch(worker, sig, model, now)
  return {worker = worker, sig = sig, model = model, now = now, claims = {}, running = {}, of_rank = {[0] = 0, 0, 0},
    leases = {}, spent = {}, limits = {}}
end

-- Seconds that a slot of the batch is expected to cost.
local function slot_cost(batch)
  batch.slot_cost = batch.slot_cost or tonumber(redis.call('HGET', key.slot_cost(batch.sig), 'slot_s') or
    redis.call('HGET', key.slot_cost('model|' .. batch.model), 'slot_s') or nil) or UNKNOWN_SLOT_S
  return batch.slot_cost
end

-- Claim a job for the worker batch.worker. Counters and charges are collected in `batch` and written once per batch.
function claim_job.take(batch, id, job)
  lane_changes.leave(id, job)
  local name = key.job(id)
  local epoch, cost = (tonumber(job.epoch) or 0) + 1, slot_cost(batch) * job.slots * (tonumber(job.left or nil) or 1)
  redis.call('HSET', name, 'state', 'running', 'worker', batch.worker, 'started', whole(batch.now), 'epoch', epoch,
    'attempts', (tonumber(job.attempts) or 0) + 1, 'charged', string.format('%.9g', cost),
    'event', events.publish(id, job.tenant, 'running', job.webhook))
  redis.call('HDEL', name, 'returned', 'passed', 'src', 'entry', 'waiting_worker', 'waited')
  groups.note(id, job, 'running', batch.now)
  latest_start.unlist(id, job)
  table.insert(batch.leases, whole(batch.now + conf.lease_ms))
  table.insert(batch.leases, id)
  batch.running[job.tenant] = (batch.running[job.tenant] or 0) + job.slots
  batch.of_rank[job.rank] = batch.of_rank[job.rank] + job.slots
  batch.spent[job.tenant] = (batch.spent[job.tenant] or 0) + cost
  quota.use(batch.limits, job.tenant, job.slots, id)
  local waited = math.max(0, math.floor(batch.now - (tonumber(job.arrived) or batch.now)))
  table.insert(batch.claims, job_record.claimed(id, job, epoch, waited, batch.now))
end

-- Write the lanes and counters that a batch has changed.
function claim_job.count(batch)
  lane_changes.write()
  if not batch.claims[1] then return end
  for tenant, slots in pairs(batch.running) do queue.count_running(tenant, slots) end
  redis.call('HINCRBY', key.claimed_jobs, batch.worker, #batch.claims)
  redis.call('HINCRBY', key.signature(batch.sig), 'running', #batch.claims)
  queue.add_all(key.leases, batch.leases)
  tenants.charge(batch.spent, batch.now)
end

-- Set the field `passed` of a job: when others first passed it since its last claim.
function claim_job.note_passed(batch, id, job)
  local passed = tonumber(job.passed or nil)
  if passed and passed > batch.now then redis.call('HDEL', key.job(id), 'passed') end -- the clock was set back
  redis.call('HSETNX', key.job(id), 'passed', whole(batch.now))
end

-- Let a job that needs more slots than are left lead its tenant's jobs in the next batch.
function claim_job.skip(batch, id, job)
  local name = key.job(id)
  if job.src == 'lane' then
    lane_changes.leave(id, job)
    job.src = 'front'
    redis.call('HSET', name, 'src', 'front', 'entry', '')
    lane_changes.add_returned(id, job, batch.now)
  end
  claim_job.note_passed(batch, id, job)
  redis.call('HSETNX', name, 'returned', whole(batch.now))
end

-- Keep slots of the worker free for a job that it skipped; for a while no other worker does so too (`facts.py`).
function claim_job.wait_for(batch, id)
  redis.call('HSET', key.job(id), 'waiting_worker', batch.worker, 'waited', whole(batch.now))
end

-- What becomes of a queued job that loses its place: 'expire' when it can no longer meet its deadline, 'late' when its latest
-- start has passed; nil if it keeps it.
function claim_job.loses_place(job, now)
  if latest_start.is_missed(job, now) then return 'expire' end
  return job.src == 'dated' and job_record.slack(job, now) < 0 and 'late' or nil
end
