-- NEEDS lane_turns choice
-- Part of claim and join: claim jobs of one signature for a batch.

local fill = {}
local LOST_READ = 16

-- The first lost job whose tenant's quota allows its slots, the least-served tenant first.
local function first_lost(b, rank)
  local jobs, ids = {}, queue.of_rank(key.solo(b.sig), rank, 0, LOST_READ)
  for _, id in ipairs(ids) do
    local job = job_state.load(id)
    if not job or job.state ~= 'queued' then
      redis.call('ZREM', key.solo(b.sig), id)
    elseif not claim_job.expired(id, job, b.now) and quota.allows(b, job.tenant, job.slots) then
      table.insert(jobs, {id = id, job = job, at = #jobs + 1, usage = tenants.usage_of(job.tenant) or 0})
    end
  end
  table.sort(jobs, function(a, c)
    if a.usage ~= c.usage then return a.usage < c.usage end
    return a.at < c.at
  end)
  return jobs[1]
end

local function lost_overdue_after(b, place)
  for at = place + 1, #b.ranks do
    local id = queue.first(key.solo(b.sig), b.ranks[at])
    local since = id and tonumber(redis.call('HGET', key.job(id), 'returned') or nil)
    if since and b.now - since > conf.overdue_ms then return true end
  end
  return false
end

-- Claim the first lost job, to run solo, if it is next. Returns whether that decides the batch.
local function claim_lost(b)
  if redis.call('EXISTS', key.solo(b.sig)) == 0 then return false end
  for place, rank in ipairs(b.ranks) do
    local lost = first_lost(b, rank)
    if lost then
      if lost.job.slots <= b.left then
        queue.remove_returned(lost.id, lost.job)
        claim_job.take(b, lost.id, lost.job)
        queue.update_lane(lost.job, queue.head(key.lane(b.sig, rank, lost.job.tenant)))
        return true
      end
      claim_job.skip(b, lost.id)
      b.held = claim_job.reserves_slots(lost.id, b.worker, b.now)
      return b.held
    end
    -- Jobs of a higher priority go first, unless the lost job is overdue.
    local jobs = tonumber(redis.call('HGET', key.signature(b.sig), 'jobs:' .. rank) or 0) or 0
    if jobs > 0 and not lost_overdue_after(b, place) then return false end
  end
  return false
end

-- The slots of a new batch: at most the model's maximum and the efficient rows. If a job needs several slots, efficient
-- rows are no limit: the job could never start.
local function slots_to_start(b)
  local names = {'batch'}
  for _, rank in ipairs(b.ranks) do
    table.insert(names, 'jobs:' .. rank)
    table.insert(names, 'slots:' .. rank)
  end
  local state = redis.call('HMGET', key.signature(b.sig), unpack(names))
  local most = math.min(b.left, tonumber(state[1] or nil) or b.left)
  for at = 2, #state, 2 do
    if state[at] ~= state[at + 1] then return most end
  end
  return math.min(most, tonumber(redis.call('GET', key.efficient_rows(b.sig)) or nil) or most)
end

-- Claim up to b.left slots of b.sig, a signature of b.model, for the worker b.worker, with the ranks b.ranks in this order.
-- With b.starting the batch can be one lost job, unless its worker has other jobs (b.has_other_jobs). `c` is the choice that
-- led to the signature.
function fill.fill(b, c)
  b.now, b.worker, b.quotas, b.short = c.now, c.worker, c.quotas, c.short
  b.claims, b.taken, b.leases, b.spent = {}, {}, {}, {}
  if b.starting then b.left = slots_to_start(b) end
  local solo = b.starting and not b.has_other_jobs and claim_lost(b)
  if not solo then
    for _, rank in ipairs(b.ranks) do
      if b.left <= 0 or b.held then break end
      lane_turns.share(b, rank)
    end
  end
  claim_job.count(b)
  queue.refresh(b.sig, b.now)
  if b.claims[1] then wakeups.claimed(b.worker, b.sig, b.now) end
  local bulk, above = 0, 0
  for _, group in pairs(b.taken) do
    if group.rank == 2 then bulk = bulk + group.slots else above = above + group.slots end
  end
  bulk_share.record(c.models, b.model, bulk, above, b.now)
  return b.claims
end
