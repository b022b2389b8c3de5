-- NEEDS lane_turns
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
    elseif not claim_job.expired(b, id, job) and quota.allows(b, job.tenant, job.slots) then
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
    if b.queued[rank].jobs > 0 and not lost_overdue_after(b, place) then return false end
  end
  return false
end

-- Learn the largest batch of the signature, its queued jobs and slots by rank, and the ranks in the order of their steps.
local function learn_queued(b)
  local state = redis.call('HMGET', key.signature(b.sig), 'batch', 'jobs:0', 'slots:0', 'jobs:1', 'slots:1', 'jobs:2', 'slots:2')
  b.batch, b.queued, b.ranks = tonumber(state[1] or nil), {}, {}
  local known = {}
  for rank = 0, 2 do
    b.queued[rank] = {jobs = tonumber(state[2 * rank + 2] or nil) or 0, slots = tonumber(state[2 * rank + 3] or nil) or 0}
  end
  for _, step in ipairs(b.steps) do
    for _, part in ipairs(step.parts) do
      if not known[part.rank] then table.insert(b.ranks, part.rank) end
      known[part.rank] = true
    end
  end
end

-- The slots of a new batch: at most the model's maximum and the efficient rows. If a job needs several slots, efficient
-- rows are no limit: the job could never start.
local function slots_to_start(b)
  local most = math.min(b.left, b.batch or b.left)
  for _, rank in ipairs(b.ranks) do
    if b.queued[rank].jobs ~= b.queued[rank].slots then return most end
  end
  return math.min(most, tonumber(redis.call('GET', key.efficient_rows(b.sig)) or nil) or most)
end

-- Claim up to b.left slots of b.sig, a signature of b.model, for the worker b.worker, in the order of the steps b.steps.
-- With b.starting the batch can be one lost job, unless its worker has other jobs (b.has_other_jobs). `c` is the choice that
-- led to the signature.
function fill.fill(b, c)
  b.now, b.worker, b.quotas, b.short = c.now, c.worker, c.quotas, c.short
  b.claims, b.taken, b.leases, b.spent, b.expired = {}, {}, {}, {}, 0
  learn_queued(b)
  if b.starting then b.left = slots_to_start(b) end
  local solo = b.starting and not b.has_other_jobs and claim_lost(b)
  if not solo then
    for _, step in ipairs(b.steps) do
      if b.left <= 0 or b.held then break end
      lane_turns.share(b, c, step.parts)
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
