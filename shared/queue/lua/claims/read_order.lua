-- NEEDS model_loads tenants dated last_claim
-- RUNS when Redis is full
-- Read what decides which signature a worker claims: a bounded number of rows, whatever is queued. `shared/queue/order`
-- decides.
-- args     worker, token, preempted, page, tenants, models...
--          `token`: of the request, the same when a worker repeats its last one, '' to claim nothing; `preempted`: tenants
--          with jobs on this worker that would be preempted, separated by spaces; `page`: of the signatures that have been
--          ready longest, from 0; `tenants`: read tenants and their signatures
-- Returns  JSON: {claims} with what the worker's last request claimed if this repeats it, or {now, preempted, models,
--          orders}, as `shared/queue/order/facts.py` reads them
local TENANTS, SIGNATURES, READY = 8, 4, 8
-- Ready signatures of a part, after which those of no further tenant are read; interactive jobs have two parts.
local COMPARED = 4
local worker, page, now = args.worker, args.page, clock_ms()
local has_deadlines = redis.call('EXISTS', key.deadlines) == 1
local limits, with_tenants = {}, args.tenants

-- The first signatures of a tenant. With late jobs in all of them, also the first whose dated jobs are not; with dated jobs
-- in all of them, also the first one without. Of each {signature, ready, least latest start, how often overtaken}.
local function signatures_of(tenant, model, rank)
  local name, names, out = key.tenant_signatures(tenant, model, rank), {}, {}
  local rows = redis.call('ZRANGE', name, 0, SIGNATURES - 1, 'WITHSCORES')
  local function add(least, most, count)
    for _, value in ipairs(redis.call('ZRANGEBYSCORE', name, least, most, 'WITHSCORES', 'LIMIT', 0, count)) do
      table.insert(rows, value)
    end
  end
  local last = #rows == 2 * SIGNATURES and tonumber(rows[#rows]) or 0
  if dated.has_any(last) then
    if dated.has_late(last, now) then add('(' .. whole(dated.placed(now)), '(0', SIGNATURES) end
    add(0, '+inf', 1)
  end
  for at = 1, #rows, 2 do table.insert(names, rows[at]) end
  if not names[1] then return out end
  for at, ready in ipairs(redis.call('ZMSCORE', key.ready(model, rank), unpack(names))) do
    if ready then
      local sig = names[at]
      local start_by = dated.start_by_of(tonumber(rows[2 * at]), {sig = sig, rank = rank, tenant = tenant}, now)
      local overtaken = has_deadlines and redis.call('HGET', key.signature(sig), 'overtaken:' .. rank)
      table.insert(out, {sig, tonumber(ready), start_by or cjson.null, tonumber(overtaken or nil) or 0})
    end
  end
  return out
end

-- The tenants with the least usage, and the signatures of the first of them.
local function tenants_of(model, rank)
  local out, names, left = {}, {}, rank == 0 and 2 * COMPARED or COMPARED
  local rows = tenants.first(key.tenant_order(model, rank), TENANTS)
  for at, row in ipairs(rows) do names[at] = row.tenant end
  quota.learn(limits, names)
  for _, row in ipairs(rows) do
    local signatures = {}
    if left > 0 and quota.allows(limits, row.tenant, 1) then
      signatures = signatures_of(row.tenant, model, rank)
      for _, one in ipairs(signatures) do if one[2] <= now then left = left - 1 end end
    end
    table.insert(out, {row.tenant, row.usage, quota.row(limits, row.tenant), signatures})
  end
  return out
end

local repeated = args.token ~= '' and last_claim.repeated(worker, args.token)
if repeated then return cjson.encode({claims = repeated}) end
local policies = {conf.overdue_ms, conf.aging_ms, conf.bulk_share, conf.interactive_allowance_s}
local facts = {now = now, preempted = {}, policies = policies, models = {}, orders = {}}
for tenant in string.gmatch(args.preempted, '%S+') do table.insert(facts.preempted, tenants.usage_of(tenant) or 0) end
for _, model in ipairs(pauses.without(args.models)) do
  table.insert(facts.models, {model.name, tonumber(redis.call('HGET', key.bulk_credit, model.name) or nil) or 0})
  local holders = model.load_ms ~= 0 and model_loads.others_holding(model.name, worker, now) or 0
  for rank = 0, 2 do
    local ready = redis.call('ZRANGE', key.ready(model.name, rank), page * READY, (page + 1) * READY - 1, 'WITHSCORES')
    if ready[1] then
      local rows = with_tenants and tenants_of(model.name, rank) or {}
      local has_tenants = rows[1] ~= nil or not with_tenants and redis.call('EXISTS', key.tenant_order(model.name, rank)) == 1
      local work = holders > 0 and model_loads.queued_work(model.name, rank, now) or 0
      table.insert(facts.orders, {model.name, rank, has_tenants, rows, ready, holders, work})
    end
  end
end
return cjson.encode(facts)
