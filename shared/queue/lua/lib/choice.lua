-- NEEDS model_loads tenants
-- Part of claim and join: which signature a worker claims next. Claim takes the first row that gives jobs; join holds jobs
-- back when that row is of another signature. Every step reads a bounded number of rows, whatever is queued.
-- A choice `c` has worker, models, lowest (rank), now, quotas and short.
-- Bulk jobs get a share of the slots however many others are queued. bulk_credit has the slots that are due to the bulk jobs
-- of a model. It grows with the slots of others that start while bulk jobs are ready, and shrinks with bulk slots down to a
-- debt: a batch takes more than is due. While a slot is due, bulk precedes standard.

local bulk_share, choice = {}, {}
local MOST_DUE = 64
local KEEP_MS = 3600000

-- The credit that `slots` above bulk add: bulk gets `share` of the sum of both.
function bulk_share.growth(slots, share) return slots * share / (1 - share) end

-- The models whose bulk jobs precede standard ones, as a set.
function bulk_share.due(models, lowest)
  local due, names = {}, {}
  if lowest < 2 or conf.bulk_share <= 0 or not models[1] then return due end
  for at, model in ipairs(models) do names[at] = model.name end
  for at, credit in ipairs(redis.call('HMGET', key.bulk_credit, unpack(names))) do
    due[names[at]] = (tonumber(credit or nil) or 0) >= 1 or nil
  end
  return due
end

-- The priorities in the order of service, for a model whose bulk jobs are due or not.
function bulk_share.ranks(due, lowest)
  if due and lowest == 2 then return {0, 2, 1} end
  local ranks = {}
  for rank = 0, lowest do ranks[rank + 1] = rank end
  return ranks
end

local function set(model, credit)
  redis.call('HSET', key.bulk_credit, model, string.format('%.6g', math.min(MOST_DUE, credit)))
  redis.call('PEXPIRE', key.bulk_credit, KEEP_MS)
end

local function credit_of(model) return tonumber(redis.call('HGET', key.bulk_credit, model) or nil) or 0 end

-- Record the slots of a claim of `model`: `bulk` ones, and `above` of a higher priority.
function bulk_share.record(models, model, bulk, above, now)
  if conf.bulk_share <= 0 then return end
  if bulk > 0 then
    local credit = credit_of(model)
    if credit > 0 then set(model, math.max(-MOST_DUE, credit - bulk)) end
  end
  if above <= 0 then return end
  local orders, waiting = {}, {}
  for at, one in ipairs(models) do orders[at] = key.tenant_order(one.name, 2) end
  if not orders[1] or redis.call('EXISTS', unpack(orders)) == 0 then return end
  for _, one in ipairs(models) do
    local first = redis.call('ZRANGE', key.ready(one.name, 2), 0, 0, 'WITHSCORES')
    if first[1] and tonumber(first[2]) <= now then table.insert(waiting, one.name) end
  end
  for _, name in ipairs(waiting) do
    set(name, credit_of(name) + bulk_share.growth(above, conf.bulk_share) / #waiting)
  end
end

local EACH = 4
local TENANTS, PAGES = 8, 4
local SIGNATURES = 4

-- Whether row `a` goes before `b`. row.model_available: its model is in memory, or it has waited for the load; row.usage: GPU
-- usage of its tenant; row.sort_ms: from model_loads.
function choice.before(a, b)
  if a.model_available ~= b.model_available then return a.model_available end
  if a.usage ~= b.usage then return a.usage < b.usage end
  if a.sort_ms ~= b.sort_ms then return a.sort_ms < b.sort_ms end
  return a.sig < b.sig
end

function choice.new(worker, models, lowest, now)
  return {worker = worker, models = models, lowest = lowest, now = now, quotas = {}, short = {},
    due = bulk_share.due(models, lowest)}
end

-- The priorities in the order of service, each with its models.
function choice.steps(c)
  local steps, due = {{rank = 0, models = c.models}}, {}
  for _, model in ipairs(c.models) do if c.due[model.name] then table.insert(due, model) end end
  if due[1] then table.insert(steps, {rank = 2, models = due}) end
  for rank = 1, c.lowest do table.insert(steps, {rank = rank, models = c.models}) end
  return steps
end

-- The first tenants of an order with free slots. Tenants without any leave it until one becomes free.
local function tenants_with_slots(c, model, rank)
  for _ = 1, PAGES do
    local order, free, names = tenants.first(key.tenant_order(model, rank), TENANTS), {}, {}
    for at, row in ipairs(order) do names[at] = row.tenant end
    quota.learn(c, names)
    for _, row in ipairs(order) do
      if quota.allows(c, row.tenant, 1) then table.insert(free, row) else tenants.defer(row.tenant, model, rank) end
    end
    if free[1] or #order < TENANTS then return free end
  end
  return {}
end

-- The ready signatures among the first of a tenant.
local function signatures_of(c, row, model, rank, found)
  local sigs = redis.call('ZRANGE', key.tenant_signatures(row.tenant, model.name, rank), 0, SIGNATURES - 1)
  if not sigs[1] then return end
  for at, ready in ipairs(redis.call('ZMSCORE', key.ready(model.name, rank), unpack(sigs))) do
    ready = tonumber(ready or nil)
    if ready and ready <= c.now then
      table.insert(found, {sig = sigs[at], ready = ready, tenant = row.tenant, usage = row.usage, model = model, rank = rank})
    end
  end
end

local function sorted(rows)
  table.sort(rows, choice.before)
  return rows
end

local function add_free(c, rows, found, model, rank)
  for _, row in ipairs(model_loads.place(found, c.worker, model, rank, c.now)) do
    if row.free <= c.now then table.insert(rows, row) end
  end
end

-- Ready signatures of the tenants with the least GPU usage.
function choice.by_tenant(c, step)
  local rows = {}
  for _, model in ipairs(step.models) do
    local found = {}
    for _, row in ipairs(tenants_with_slots(c, model.name, step.rank)) do
      if #found >= EACH then break end
      signatures_of(c, row, model, step.rank, found)
    end
    add_free(c, rows, found, model, step.rank)
  end
  return sorted(rows)
end

-- The signatures that have been ready longest, for when the first tenants have none that can start. A worker to which they
-- gave nothing looks further at its next claim (`pass`).
function choice.by_readiness(c, step)
  local rows = {}
  for _, model in ipairs(step.models) do
    if redis.call('EXISTS', key.tenant_order(model.name, step.rank)) == 1 then
      local field, found = model.name .. '|' .. step.rank, {}
      local skipped = tonumber(redis.call('HGET', key.claims_passed(c.worker), field) or nil) or 0
      local ready = redis.call('ZRANGEBYSCORE', key.ready(model.name, step.rank), '-inf', whole(c.now), 'WITHSCORES', 'LIMIT',
        skipped, 2 * EACH)
      for at = 1, #ready, 2 do
        table.insert(found, {sig = ready[at], ready = tonumber(ready[at + 1]), usage = 0, model = model, rank = step.rank})
      end
      if skipped > 0 and #found < 2 * EACH then redis.call('HDEL', key.claims_passed(c.worker), field) end
      add_free(c, rows, found, model, step.rank)
    end
  end
  return sorted(rows)
end

-- Start after this row of `by_readiness` at the worker's next claims.
function choice.pass(c, row)
  local name = key.claims_passed(c.worker)
  redis.call('HINCRBY', name, row.model.name .. '|' .. row.rank, 1)
  redis.call('PEXPIRE', name, 10000)
end
