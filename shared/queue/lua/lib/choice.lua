-- NEEDS model_loads tenants bulk_share dated
-- Part of claim and join: which signature a worker claims next. Claim takes the first row that gives jobs; join holds jobs
-- back when that row is of another signature. Every step reads a bounded number of rows, whatever is queued.
-- Priorities order the jobs of one tenant. Between tenants, interactive jobs go first only while their tenant is `ahead`:
-- its GPU usage is at most an allowance above that of the least-served tenant that they delay. Beyond it they go with
-- the standard jobs of others, by usage.

local choice = {}
local EACH = 4
local TENANTS, PAGES = 8, 4
local SIGNATURES = 4

-- Whether row `a` goes before `b`. row.load_justified: its model is in memory, or its jobs have already been ready for three
-- load times, six if other workers hold the model; row.usage: GPU usage of its tenant; row.own_rank: orders the jobs of one
-- tenant; row.turn, row.start_by: from `dated`, nil beyond the first tenants; row.sort_ms: from model_loads.
function choice.before(a, b)
  if a.load_justified ~= b.load_justified then return a.load_justified end
  if a.usage ~= b.usage then return a.usage < b.usage end
  if a.own_rank ~= b.own_rank then return a.own_rank < b.own_rank end
  local turn, other = a.turn or 2, b.turn or 2
  if turn ~= other then return turn < other end
  if turn == 1 and a.start_by ~= b.start_by then return a.start_by < b.start_by end
  if a.sort_ms ~= b.sort_ms then return a.sort_ms < b.sort_ms end
  return a.sig < b.sig
end

-- The request of a worker for jobs: one call of claim or join. Its fields:
--   worker, now     who asks, and when (ms)
--   models          from model_loads.models, without paused ones
--   lowest          the lowest priority that it takes, as a rank
--   preempted       names of tenants, separated by spaces, with jobs on this worker that would be delayed
--   quotas, short   of `quota`: limits of tenants read so far; tenants with jobs that did not start because of theirs
--   orders          tenants with free slots, by model and rank, once read
--   due             models in which bulk jobs precede standard ones, as a set
--   most_ahead      the highest GPU usage with which a tenant is ahead, once computed
function choice.new(worker, all_models, lowest, preempted, now)
  local models = pauses.without(all_models)
  return {worker = worker, models = models, lowest = lowest, preempted = preempted, now = now, quotas = {}, short = {},
    orders = {}, due = bulk_share.due(models, lowest)}
end

-- The steps in the order of service, each with its models and its parts: a rank, of all tenants (ahead is nil), of those
-- that are ahead, or of the others.
function choice.steps(request)
  local steps, due = {{parts = {{rank = 0, ahead = true}}, models = request.models}}, {}
  for _, model in ipairs(request.models) do if request.due[model.name] then table.insert(due, model) end end
  if due[1] then table.insert(steps, {parts = {{rank = 2}}, models = due}) end
  if request.lowest >= 1 then
    table.insert(steps, {parts = {{rank = 0, ahead = false}, {rank = 1}}, models = request.models})
  end
  if request.lowest >= 2 then table.insert(steps, {parts = {{rank = 2}}, models = request.models}) end
  return steps
end

-- A row with its turn. `others`: some signature of its tenant and priority has dated jobs.
function choice.with_turn(row, others, now)
  if not others and not row.start_by then return row end
  local overtaken = nil
  if not row.start_by and dated.is_aged(row.ready, now) then
    overtaken = tonumber(redis.call('HGET', key.signature(row.sig), 'overtaken:' .. row.rank) or nil)
  end
  row.turn = dated.turn({start_by = row.start_by, since = row.ready, overtaken = overtaken}, now)
  return row
end

-- A claim of `first`: count that a row with dated jobs overtakes aged ones of its tenant. A row that had its turn is counted from 0.
function choice.note_overtaken(first, rows, now)
  local field = 'overtaken:' .. first.rank
  if first.turn == 0 then redis.call('HDEL', key.signature(first.sig), field) end
  for _, row in ipairs(first.start_by and rows or {}) do
    if row.turn == 2 and row.tenant == first.tenant and row.rank == first.rank and dated.is_aged(row.ready, now) then
      redis.call('HINCRBY', key.signature(row.sig), field, 1)
    end
  end
end

function choice.has_model(step, name)
  for _, model in ipairs(step.models) do if model.name == name then return true end end
  return false
end

-- The first tenants of an order with free slots. Tenants without any leave it until one becomes free.
local function read_tenants(request, model, rank)
  for _ = 1, PAGES do
    local order, free, names = tenants.first(key.tenant_order(model, rank), TENANTS), {}, {}
    for at, row in ipairs(order) do names[at] = row.tenant end
    quota.learn(request, names)
    for _, row in ipairs(order) do
      if quota.allows(request, row.tenant, 1) then table.insert(free, row) else tenants.defer(row.tenant, model, rank) end
    end
    if free[1] or #order < TENANTS then return free end
  end
  return {}
end

local function tenants_with_slots(request, model, rank)
  local name = model .. '|' .. rank
  if not request.orders[name] then request.orders[name] = read_tenants(request, model, rank) end
  return request.orders[name]
end

-- The highest GPU usage with which a tenant is ahead. least: of the tenants that would be delayed, nil for none.
function choice.most_ahead(least, now)
  if not least then return math.huge end
  return tenants.usage_after(least > 0 and least or nil, conf.interactive_allowance_s, now) or 0
end

local function most_ahead(request)
  if request.most_ahead then return request.most_ahead end
  local least = nil
  local function note(usage) least = math.min(least or math.huge, usage) end
  for tenant in string.gmatch(request.preempted, '%S+') do note(tenants.usage_of(tenant) or 0) end
  for _, model in ipairs(request.models) do
    local first = tenants_with_slots(request, model.name, 1)[1]
    if first then note(first.usage) end
    first = request.due[model.name] and tenants_with_slots(request, model.name, 2)[1]
    if first then note(first.usage) end
  end
  request.most_ahead = choice.most_ahead(least, request.now)
  return request.most_ahead
end

-- Whether a part of a step has the jobs of a tenant with this usage.
function choice.includes(request, part, usage)
  return part.ahead == nil or (usage <= most_ahead(request)) == part.ahead
end

-- The rows of `rows` that are in a part, and whether there are others.
local function included(request, part, rows)
  local found = {}
  for _, row in ipairs(rows) do if choice.includes(request, part, row.usage) then table.insert(found, row) end end
  return found, #found < #rows
end

-- The first signatures of a tenant. With late jobs in all of them, also the first whose dated jobs are not; with dated jobs in all
-- of them, also the first one without.
local function first_signatures(tenant, model, rank, now)
  local name, sigs, start_by = key.tenant_signatures(tenant, model, rank), {}, {}
  local rows = redis.call('ZRANGE', name, 0, SIGNATURES - 1, 'WITHSCORES')
  local last = #rows == 2 * SIGNATURES and tonumber(rows[#rows]) or 0
  local function add(least, most, count)
    for _, value in ipairs(redis.call('ZRANGEBYSCORE', name, least, most, 'WITHSCORES', 'LIMIT', 0, count)) do
      table.insert(rows, value)
    end
  end
  if dated.has_any(last) then
    if dated.has_late(last, now) then add('(' .. whole(dated.placed(now)), '(0', SIGNATURES) end
    add(0, '+inf', 1)
  end
  for at = 1, #rows, 2 do
    table.insert(sigs, rows[at])
    start_by[#sigs] = dated.start_by_of(tonumber(rows[at + 1]), {sig = rows[at], rank = rank, tenant = tenant}, now)
  end
  return sigs, start_by
end

-- The ready signatures among the first of a tenant.
local function signatures_of(request, row, model, rank, found)
  local sigs, start_by = first_signatures(row.tenant, model.name, rank, request.now)
  if not sigs[1] then return end
  for at, ready in ipairs(redis.call('ZMSCORE', key.ready(model.name, rank), unpack(sigs))) do
    ready = tonumber(ready or nil)
    if ready and ready <= request.now then
      table.insert(found, choice.with_turn({sig = sigs[at], ready = ready, tenant = row.tenant, usage = row.usage, model = model,
        rank = rank, own_rank = rank, start_by = start_by[at]}, next(start_by) ~= nil, request.now))
    end
  end
end

local function sorted(rows)
  table.sort(rows, choice.before)
  return rows
end

local function add_free(request, rows, found, model, rank)
  for _, row in ipairs(model_loads.place(found, request.worker, model, rank, request.now)) do
    if row.free <= request.now then table.insert(rows, row) end
  end
end

-- Ready signatures of the tenants with the least GPU usage.
function choice.by_tenant(request, step)
  local rows = {}
  for _, part in ipairs(step.parts) do
    for _, model in ipairs(step.models) do
      local found = {}
      for _, row in ipairs(included(request, part, tenants_with_slots(request, model.name, part.rank))) do
        if #found >= EACH then break end
        signatures_of(request, row, model, part.rank, found)
      end
      add_free(request, rows, found, model, part.rank)
    end
  end
  return sorted(rows)
end

-- Whether signatures beyond the first tenants can be in a part. The first tenants have the least usage: behind one that is
-- not ahead there is none that is.
local function has_more(request, part, model)
  if redis.call('EXISTS', key.tenant_order(model, part.rank)) == 0 then return false end
  if part.ahead == nil then return true end
  local rows, others = included(request, part, tenants_with_slots(request, model, part.rank))
  if part.ahead then return not others end
  return rows[1] ~= nil
end

local function ready_longest(request, part, model)
  local field, found = model.name .. '|' .. part.rank, {}
  local rows_skipped = tonumber(redis.call('HGET', key.claims_passed(request.worker), field) or nil) or 0
  local ready = redis.call('ZRANGEBYSCORE', key.ready(model.name, part.rank), '-inf', whole(request.now), 'WITHSCORES',
    'LIMIT', rows_skipped, 2 * EACH)
  for at = 1, #ready, 2 do
    table.insert(found, {sig = ready[at], ready = tonumber(ready[at + 1]), usage = 0, model = model, rank = part.rank,
      own_rank = 0})
  end
  if rows_skipped > 0 and #found < 2 * EACH then redis.call('HDEL', key.claims_passed(request.worker), field) end
  return found
end

-- The signatures that have been ready longest, for when the first tenants have none that can start. A worker to which they
-- gave nothing looks further at its next claim (`skip_row`).
function choice.by_readiness(request, step)
  local rows = {}
  for _, part in ipairs(step.parts) do
    for _, model in ipairs(step.models) do
      if has_more(request, part, model.name) then
        add_free(request, rows, ready_longest(request, part, model), model, part.rank)
      end
    end
  end
  return sorted(rows)
end

-- Start after this row of `by_readiness` at the worker's next claims.
function choice.skip_row(request, row)
  local name = key.claims_passed(request.worker)
  redis.call('HINCRBY', name, row.model.name .. '|' .. row.rank, 1)
  redis.call('PEXPIRE', name, 10000)
end
