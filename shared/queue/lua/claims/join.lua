-- NEEDS fill last_claim
-- RUNS when Redis is full
-- Let a running batch claim more jobs of its signature, ready or not, unless another signature is overdue, or has a job that must
-- start before the batch could end, and the next claim would choose it.
-- ARGV     worker, token, signature, slots, lowest_rank, preempted, models...
--          `token`, `preempted`, `models`: as in claim
-- Returns  as claim; nil if queued jobs were held back for another signature
local worker, token, sig, lowest, now = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5]), clock_ms()
local request = choice.new(worker, model_loads.models(7), lowest, ARGV[6], now)
local own = redis.call('HGET', key.signature(sig), 'model')
local URGENT_READ = 8

-- Whether other signatures are overdue in this step.
local function others_overdue(step)
  for _, part in ipairs(step.parts) do
    for _, model in ipairs(step.models) do
      local overdue = redis.call('ZRANGEBYSCORE', key.ready(model.name, part.rank), '-inf', whole(now - conf.overdue_ms),
        'LIMIT', 0, 2)
      if overdue[2] or (overdue[1] and overdue[1] ~= sig) then return true end
    end
  end
  return false
end

local urgent_by = nil

-- Latest starts before this time are urgent: a job that joins now has ended by then.
local function urgent_before()
  urgent_by = urgent_by or now + latest_start.run_ms(sig, now)
  return urgent_by
end

-- Whether other signatures have urgent jobs in this step.
local function others_urgent(step)
  if redis.call('EXISTS', key.deadlines) == 0 then return false end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.deadlines, '(' .. whole(now), whole(urgent_before()), 'LIMIT', 0, URGENT_READ)) do
    local job = redis.call('HMGET', key.job(id), 'sig', 'model', 'rank')
    for _, part in ipairs(step.parts) do
      if job[1] ~= sig and tonumber(job[3] or nil) == part.rank and choice.has_model(step, job[2]) then return true end
    end
  end
  return false
end

-- This signature as a row of `choice`; nil if it is not ready in that part.
local function row_of(part)
  local ready = tonumber(redis.call('ZSCORE', key.ready(own, part.rank), sig) or nil)
  if not ready or ready > now then return nil end
  local count, rows = 1, nil
  repeat
    count = 8 * count
    rows = tenants.first(key.lane_order(sig, part.rank), count)
    for _, row in ipairs(rows) do
      if choice.includes(request, part, row.usage) and quota.allows(request, row.tenant, 1) then
        local placed = tonumber(redis.call('ZSCORE', key.tenant_signatures(row.tenant, own, part.rank), sig) or nil)
        return choice.with_turn({sig = sig, load_justified = true, usage = row.usage, own_rank = part.rank, sort_ms = ready,
          ready = ready, rank = part.rank, tenant = row.tenant, start_by = placed and dated.start_by_of(placed, {sig = sig, rank = part.rank, tenant = row.tenant}, now)}, true, now)
      end
    end
  until #rows < count or count >= tenants.SEARCHED
end

-- The first row of this signature in a step, or nil.
local function own_row(step)
  local first = nil
  for _, part in ipairs(step.parts) do
    local row = row_of(part)
    if row and not (first and choice.before(first, row)) then first = row end
  end
  return first
end

local overtaken = {} -- by the claims, if there are any: {row, the others}

-- Whether an overdue or urgent signature goes before this one at the next claim.
local function comes_later(step)
  if not others_overdue(step) and not others_urgent(step) then return false end
  local rows, mine = choice.by_tenant(request, step), own_row(step)
  if not rows[1] then
    rows = choice.by_readiness(request, step)
    if mine then mine.usage, mine.own_rank, mine.turn = 0, 0, nil end
  end
  for _, row in ipairs(rows) do
    local due = row.sort_ms <= now - conf.overdue_ms or (row.start_by and row.start_by <= urgent_before())
    if row.sig ~= sig and due and not (mine and choice.before(mine, row)) then return true end
  end
  if mine and mine.start_by then table.insert(overtaken, {mine, rows}) end
  return false
end

-- Whether a lost job of this signature has waited for the end of the batch.
local function lost_overdue(step)
  for _, part in ipairs(step.parts) do
    local since = fill.lost_since(sig, part.rank, request)
    if since and since <= now - conf.overdue_ms then return true end
  end
  return false
end

-- The steps that can join, and whether queued jobs of others are held back.
local function allowed_steps()
  local allowed, complete = {}, {} -- complete: ranks of which all jobs can join
  for _, step in ipairs(choice.steps(request)) do
    local mine = choice.has_model(step, own)
    if comes_later(step) or (mine and lost_overdue(step)) then break end
    if mine then
      table.insert(allowed, step)
      -- Jobs of rank 0 can be in two steps.
      for _, part in ipairs(step.parts) do complete[part.rank] = part.ahead ~= true or lowest == 0 end
    end
  end
  for rank = 0, lowest do
    if not complete[rank] and (tonumber(redis.call('HGET', key.signature(sig), 'jobs:' .. rank) or nil) or 0) > 0 then
      return allowed, true
    end
  end
  return allowed, false
end

local repeated = last_claim.repeated(worker, token)
if repeated then return repeated end
if not own then return {} end
local steps, held_back = allowed_steps()
local claims = {}
if steps[1] then
  claims = fill.fill({sig = sig, model = own, left = tonumber(ARGV[4]), steps = steps, starting = false}, request)
  last_claim.keep(worker, token, claims)
  for _, one in ipairs(claims[1] and overtaken or {}) do choice.note_overtaken(one[1], one[2], now) end
end
if claims[1] or not held_back then return claims end
return nil
