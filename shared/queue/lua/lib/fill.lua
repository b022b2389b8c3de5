-- NEEDS lane_turns
-- Part of claim and join: claim jobs of one signature for a batch.

local fill = {}
local LOST_READ = 16
local LOST_SEARCHED = 512 -- lost jobs of tenants that are paused or at their quota, behind which others are found

-- The lost jobs of a page that the quotas of their tenants allow, and how many of the page stay lost.
local function allowed_lost(batch, ids)
  local jobs, refused = {}, 0
  for _, id in ipairs(ids) do
    local job = job_state.load(id)
    if not job or job.state ~= 'queued' then
      redis.call('ZREM', key.solo(batch.sig), id)
    elseif not claim_job.removed(batch, id, job) then
      if quota.allows(batch, job.tenant, job.slots) then
        table.insert(jobs, {id = id, job = job, at = #jobs + 1, usage = tenants.usage_of(job.tenant) or 0})
      else
        refused = refused + 1
      end
    end
  end
  return jobs, refused
end

-- The first lost job that the quota of its tenant allows, the least-served tenant first.
local function first_lost(batch, rank)
  local skipped, ids, jobs, refused = 0, nil, nil, nil
  repeat
    ids = queue.of_rank(key.solo(batch.sig), rank, skipped, LOST_READ)
    jobs, refused = allowed_lost(batch, ids)
    skipped = skipped + refused
  until jobs[1] or #ids < LOST_READ or skipped >= LOST_SEARCHED or claim_job.has_removed_most(batch)
  table.sort(jobs, function(one, other)
    if one.usage ~= other.usage then return one.usage < other.usage end
    return one.at < other.at
  end)
  return jobs[1]
end

-- Since when the first lost job of a priority waits that the quota of its tenant allows; nil without one. `scope`: of `quota`.
function fill.lost_since(sig, rank, scope)
  for skipped = 0, LOST_SEARCHED - 1, LOST_READ do
    local ids = queue.of_rank(key.solo(sig), rank, skipped, LOST_READ)
    for _, id in ipairs(ids) do
      local job = redis.call('HMGET', key.job(id), 'tenant', 'slots', 'returned')
      if job[1] and quota.allows(scope, job[1], tonumber(job[2])) then return tonumber(job[3] or nil) end
    end
    if #ids < LOST_READ then return nil end
  end
end

local function lost_overdue_after(batch, place)
  for at = place + 1, #batch.ranks do
    local since = fill.lost_since(batch.sig, batch.ranks[at], batch)
    if since and batch.now - since > conf.overdue_ms then return true end
  end
  return false
end

-- Claim the first lost job, to run solo, if it is next. Returns whether that decides the batch.
local function claim_lost(batch)
  if redis.call('EXISTS', key.solo(batch.sig)) == 0 then return false end
  for place, rank in ipairs(batch.ranks) do
    local lost = first_lost(batch, rank)
    if lost then
      if claim_job.fits(batch, lost.job.slots) then
        queue.remove_returned(lost.id, lost.job)
        claim_job.take(batch, lost.id, lost.job)
        queue.update_lane(lost.job, queue.head(key.lane(batch.sig, rank, lost.job.tenant)))
        return true
      end
      claim_job.skip(batch, lost.id)
      batch.held = claim_job.reserves_slots(lost.id, batch.worker, batch.now)
      return batch.held
    end
    -- Jobs of a higher priority go first, unless the lost job is overdue.
    if batch.queued[rank].jobs > 0 and not lost_overdue_after(batch, place) then return false end
  end
  return false
end

-- Learn the largest batch of the signature, its queued jobs and slots by rank, and the ranks in the order of their steps.
local function learn_queued(batch)
  local state = redis.call('HMGET', key.signature(batch.sig), 'batch', 'jobs:0', 'slots:0', 'jobs:1', 'slots:1', 'jobs:2',
    'slots:2')
  batch.max_batch, batch.queued, batch.ranks = tonumber(state[1] or nil), {}, {}
  local known = {}
  for rank = 0, 2 do
    batch.queued[rank] = {jobs = tonumber(state[2 * rank + 2] or nil) or 0, slots = tonumber(state[2 * rank + 3] or nil) or 0}
  end
  for _, step in ipairs(batch.steps) do
    for _, part in ipairs(step.parts) do
      if not known[part.rank] then table.insert(batch.ranks, part.rank) end
      known[part.rank] = true
    end
  end
end

-- The slots of a new batch: at most the model's maximum and the efficient rows. If a job needs several slots, efficient
-- rows are no limit: the job could never start.
local function slots_to_start(batch)
  local most = math.min(batch.left, batch.max_batch or batch.left)
  for _, rank in ipairs(batch.ranks) do
    if batch.queued[rank].jobs ~= batch.queued[rank].slots then return most end
  end
  return math.min(most, tonumber(redis.call('GET', key.efficient_rows(batch.sig)) or nil) or most)
end

-- Claim jobs of one signature for a batch; returns the claims. `request` is from choice.new. The caller sets of `batch`:
--   sig, model      the signature and its model
--   left            slots that can still be claimed
--   steps           the steps of `choice` to claim from, in this order
--   starting        a new batch: it can be one lost job, unless its worker has other jobs (has_other_jobs)
-- and this function and those that it calls:
--   now, worker, quotas, short   as in `request`
--   max_batch       the most slots of a batch of the signature, or nil
--   most            the slots of a worker without jobs that starts a batch, or nil
--   queued, ranks   queued jobs and slots by rank; the ranks in the order of their steps
--   held            a skipped job reserves the slots that are left: claim no more
--   claims          rows of the reply
--   removed         how many jobs were found past their deadline and ended, or past their latest start and moved
--   taken, leases, spent   written by claim_job.count: jobs and slots claimed by rank and tenant; rows of key.leases; seconds
--                   to charge by tenant
--   slot_cost       seconds that a slot is expected to cost, once read
function fill.fill(batch, request)
  batch.now, batch.worker, batch.quotas, batch.short = request.now, request.worker, request.quotas, request.short
  batch.claims, batch.taken, batch.leases, batch.spent, batch.removed = {}, {}, {}, {}, 0
  learn_queued(batch)
  if batch.starting then
    batch.most = not batch.has_other_jobs and batch.left or nil
    batch.left = slots_to_start(batch)
  end
  local solo = batch.starting and not batch.has_other_jobs and claim_lost(batch)
  if not solo then
    for _, step in ipairs(batch.steps) do
      if batch.left <= 0 or batch.held then break end
      lane_turns.share(batch, request, step.parts)
    end
  end
  claim_job.count(batch)
  queue.refresh(batch.sig, batch.now)
  if batch.claims[1] then wakeups.claimed(batch.worker, batch.sig, batch.now) end
  local bulk, above = 0, 0
  for _, group in pairs(batch.taken) do
    if group.rank == 2 then bulk = bulk + group.slots else above = above + group.slots end
  end
  bulk_share.record(request.models, batch.model, bulk, above, batch.now)
  return batch.claims
end
