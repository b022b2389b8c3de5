-- NEEDS fill last_claim
-- RUNS when Redis is full
-- Let a running batch claim more jobs of its signature, ready or not, unless another signature is overdue and the next claim
-- would choose it.
-- ARGV     worker, token, signature, slots, lowest_rank, models...
--          `token`, `models`: as in claim
-- Returns  as claim; nil if queued jobs were held back for another signature
local worker, token, sig, lowest, now = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5]), clock_ms()
local c = choice.new(worker, model_loads.models(6), lowest, now)
local own = redis.call('HGET', key.signature(sig), 'model')

-- Whether other signatures are overdue in this step.
local function others_overdue(step)
  for _, model in ipairs(step.models) do
    local overdue = redis.call('ZRANGEBYSCORE', key.ready(model.name, step.rank), '-inf', whole(now - conf.overdue_ms),
      'LIMIT', 0, 2)
    if overdue[2] or (overdue[1] and overdue[1] ~= sig) then return true end
  end
  return false
end

-- This signature as a row of `choice`; nil if it is not ready.
local function own_row(rank)
  local ready = tonumber(redis.call('ZSCORE', key.ready(own, rank), sig) or nil)
  if not ready or ready > now then return nil end
  for _, row in ipairs(tenants.first(key.lane_order(sig, rank), 8)) do
    if quota.allows(c, row.tenant, 1) then return {sig = sig, model_available = true, usage = row.usage, sort_ms = ready} end
  end
end

-- Whether an overdue signature goes before this one at the next claim.
local function comes_later(step)
  if not others_overdue(step) then return false end
  local rows, mine = choice.by_tenant(c, step), own_row(step.rank)
  if not rows[1] then
    rows = choice.by_readiness(c, step)
    if mine then mine.usage = 0 end
  end
  for _, row in ipairs(rows) do
    if row.sig ~= sig and row.sort_ms <= now - conf.overdue_ms and not (mine and choice.before(mine, row)) then return true end
  end
  return false
end

-- Whether a lost job of this signature has waited for the end of the batch.
local function lost_overdue(rank)
  local lost = queue.first(key.solo(sig), rank)
  local since = lost and tonumber(redis.call('HGET', key.job(lost), 'returned') or nil)
  return since and since <= now - conf.overdue_ms
end

-- The priorities that can join, in the order of service, and whether queued jobs of others are held back.
local function allowed_ranks()
  local ranks, known = {}, {}
  for _, step in ipairs(choice.steps(c)) do
    local mine = false
    for _, model in ipairs(step.models) do mine = mine or model.name == own end
    if comes_later(step) or (mine and lost_overdue(step.rank)) then break end
    if mine and not known[step.rank] then
      known[step.rank] = true
      table.insert(ranks, step.rank)
    end
  end
  for rank = 0, lowest do
    if not known[rank] and (tonumber(redis.call('HGET', key.signature(sig), 'jobs:' .. rank) or nil) or 0) > 0 then
      return ranks, true
    end
  end
  return ranks, false
end

local repeated = last_claim.repeated(worker, token)
if repeated then return repeated end
if not own then return {} end
local ranks, held_back = allowed_ranks()
local claims = {}
if ranks[1] then
  claims = fill.fill({sig = sig, model = own, left = tonumber(ARGV[4]), ranks = ranks, starting = false}, c)
  last_claim.keep(worker, token, claims)
end
if claims[1] or not held_back then return claims end
return nil
