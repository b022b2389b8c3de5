-- NEEDS wakeups
-- Part of the scripts that queue, claim or end jobs: the GPU time of tenants, and the orders by it.
-- An order (tenant_order of a model and priority, lane_order of a signature and priority) holds tenants with queued jobs by
-- their GPU usage when they were added. Usage grows, so a score can be too low: `first` corrects those that it reads.

local tenants = {}
local HALF_LIFE_MS = 300000
local ROUNDS = 4
-- Usage below this share of another one is nothing: it is above the rounding of a score.
local NOTHING = 1e-6
local MUCH = 1 -- by which usage has fallen to a half
local SIGNATURES_LOWERED = 16
local RESERVED_MS = 30000

local function log2(number) return math.log(number) / math.log(2) end

-- Usage is decayed GPU-seconds, stored as log2 on a moving time scale: one number that never overflows and orders tenants at
-- any time. Returns the usage after `seconds` at `at` (ms), negative to remove them; nil if nothing is left.
function tenants.usage_after(usage, seconds, at)
  if seconds == 0 then return usage end
  local other = log2(math.abs(seconds)) + at / HALF_LIFE_MS
  if seconds < 0 then
    if not usage or other > usage - NOTHING then return nil end
    return usage + log2(1 - 2 ^ (other - usage))
  end
  if not usage then return other end
  local high, low = math.max(usage, other), math.min(usage, other)
  return high + log2(1 + 2 ^ (low - high))
end

function tenants.usage_of(tenant) return tonumber(redis.call('ZSCORE', key.gpu_usage, tenant) or nil) end

-- Charge tenants the expected cost of claimed jobs. spent: seconds by tenant.
function tenants.charge(spent, now)
  local names, rows = {}, {}
  for tenant in pairs(spent) do table.insert(names, tenant) end
  for at, known in ipairs(redis.call('ZMSCORE', key.gpu_usage, unpack(names))) do
    local usage = tenants.usage_after(tonumber(known or nil), spent[names[at]], now)
    if usage then
      table.insert(rows, string.format('%.17g', usage))
      table.insert(rows, names[at])
    end
  end
  if rows[1] then redis.call('ZADD', key.gpu_usage, unpack(rows)) end
  redis.call('ZREMRANGEBYSCORE', key.gpu_usage, '-inf', whole(now / HALF_LIFE_MS - 30))
  redis.call('PEXPIRE', key.gpu_usage, 86400000)
end

local function lower_score(sig, model, rank, tenant, score)
  redis.call('ZADD', key.lane_order(sig, rank), 'XX', score, tenant)
  redis.call('ZADD', key.tenant_order(model, rank), 'XX', score, tenant)
end

-- Lower a tenant's score also among the other signatures of the model that it has queued jobs of.
local function lower_others(job, score)
  for rank = 0, 2 do
    local name = key.tenant_signatures(job.tenant, job.model, rank)
    for _, sig in ipairs(redis.call('ZRANGE', name, 0, SIGNATURES_LOWERED - 1)) do
      lower_score(sig, job.model, rank, job.tenant, score)
    end
  end
end

-- Replace the charge of a claim by the seconds that the job took.
function tenants.correct_charge(job, seconds, now)
  local charged, known = tonumber(job.charged or nil) or 0, tenants.usage_of(job.tenant)
  local usage = tenants.usage_after(known, -charged, tonumber(job.started or nil) or now)
  usage = tenants.usage_after(usage, seconds, now)
  if not usage then
    redis.call('ZREM', key.gpu_usage, job.tenant)
  elseif usage ~= known then
    redis.call('ZADD', key.gpu_usage, string.format('%.17g', usage), job.tenant)
    redis.call('PEXPIRE', key.gpu_usage, 86400000)
  end
  -- `first` finds no score that is too high.
  if known and (not usage or usage < known) then
    local score = string.format('%.17g', usage or 0)
    lower_score(job.sig, job.model, job.rank, job.tenant, score)
    if not usage or usage < known - MUCH then lower_others(job, score) end
  end
end

-- The first `count` tenants of an order, the least GPU usage first. A score below 1 is that of a tenant without usage.
function tenants.first(order, count)
  local rows
  for _ = 1, ROUNDS do
    local found, names, stale = redis.call('ZRANGE', order, 0, count - 1, 'WITHSCORES'), {}, {}
    for at = 1, #found, 2 do table.insert(names, found[at]) end
    if not names[1] then return {} end
    rows = {}
    for at, known in ipairs(redis.call('ZMSCORE', key.gpu_usage, unpack(names))) do
      local usage, score = tonumber(known or nil) or 0, tonumber(found[2 * at])
      if usage ~= score and (usage > 0 or score >= 1) then
        table.insert(stale, string.format('%.17g', usage))
        table.insert(stale, names[at])
      end
      rows[at] = {tenant = names[at], usage = usage, at = at}
    end
    if not stale[1] then break end
    redis.call('ZADD', order, 'XX', unpack(stale))
  end
  table.sort(rows, function(a, b)
    if a.usage ~= b.usage then return a.usage < b.usage end
    return a.at < b.at
  end)
  return rows
end

function tenants.is_deferred(tenant, model, rank)
  return redis.call('SISMEMBER', key.deferred(tenant), model .. '|' .. rank) == 1
end

-- Remove a tenant without free slots from an order, until `resume`.
function tenants.defer(tenant, model, rank)
  redis.call('ZREM', key.tenant_order(model, rank), tenant)
  redis.call('SADD', key.deferred(tenant), model .. '|' .. rank)
end

-- Keep the slots that a tenant at its limit gets free for a queued job.
function tenants.reserve(tenant, id, rank, slots)
  redis.call('HSET', key.reservations, tenant, table.concat({id, rank, slots, whole(clock_ms())}, ' '))
  redis.call('PEXPIRE', key.reservations, 86400000)
end

-- End the reservation of a job; returns whether there was one.
function tenants.end_reservation(tenant, id)
  local text = redis.call('HGET', key.reservations, tenant)
  return text and string.match(text, '^%S+') == id and redis.call('HDEL', key.reservations, tenant) == 1
end

-- The job that a tenant's slots are kept for: while it is queued and others of the tenant run, and RESERVED_MS beyond, in which
-- it starts if a worker is there that can run it.
function tenants.reservation(tenant, used)
  local text = redis.call('HGET', key.reservations, tenant)
  if not text then return nil end
  local id, rank, slots, since = string.match(text, '^(%S+) (%d) (%d+) (%d+)$')
  local age = clock_ms() - tonumber(since)
  local lapsed = used <= 0 and (age < 0 or age >= RESERVED_MS)
  if lapsed or redis.call('HGET', key.job(id), 'state') ~= 'queued' then
    redis.call('HDEL', key.reservations, tenant)
    return nil
  end
  return {id = id, rank = tonumber(rank), slots = tonumber(slots)}
end

-- Add a tenant to the orders that it was removed from. Returns whether there were any.
function tenants.resume(tenant)
  local orders = redis.call('SMEMBERS', key.deferred(tenant))
  if not orders[1] then return false end
  redis.call('DEL', key.deferred(tenant))
  local reserved = tenants.reservation(tenant, 1)
  if reserved then tenants.reserve(tenant, reserved.id, reserved.rank, reserved.slots) end
  local score = string.format('%.17g', tenants.usage_of(tenant) or 0)
  for _, order in ipairs(orders) do
    local model, rank = string.match(order, '^(.*)|(%d)$')
    rank = tonumber(rank)
    local sig = redis.call('ZRANGE', key.tenant_signatures(tenant, model, rank), 0, 0)[1]
    if sig then
      redis.call('ZADD', key.tenant_order(model, rank), 'NX', score, tenant)
      wakeups.note(sig)
    end
  end
  return true
end

-- Add a lane to the orders. oldest: arrival of its oldest job (ms); placed: its score among the tenant's signatures, where
-- that is another one.
function tenants.add_lane(lane, oldest, placed)
  local usage = tenants.usage_of(lane.tenant)
  -- Tenants without usage are ordered by arrival, below 1.
  local score = usage and string.format('%.17g', usage) or string.format('%.13f', oldest / 1e13)
  redis.call('ZADD', key.tenant_signatures(lane.tenant, lane.model, lane.rank), whole(placed or oldest), lane.sig)
  redis.call('ZADD', key.lane_order(lane.sig, lane.rank), 'NX', score, lane.tenant)
  if tenants.is_deferred(lane.tenant, lane.model, lane.rank) then return end
  redis.call('ZADD', key.tenant_order(lane.model, lane.rank), 'NX', score, lane.tenant)
end

-- Remove a lane from the orders; `remove` collects tenants by order.
function tenants.remove_lane(lane, remove)
  local signatures = key.tenant_signatures(lane.tenant, lane.model, lane.rank)
  redis.call('ZREM', signatures, lane.sig)
  remove(key.lane_order(lane.sig, lane.rank), lane.tenant)
  if redis.call('EXISTS', signatures) == 0 then remove(key.tenant_order(lane.model, lane.rank), lane.tenant) end
end

-- The limits of tenants' running slots. `limits`: those read so far, by tenant; false for a tenant without one. `reserved` is
-- the job that the next free slots are kept for.
local quota = {}

-- Read limits and running slots of the tenants that are not in `limits` yet.
function quota.learn(limits, names)
  local unknown, fields = {}, {}
  for _, tenant in ipairs(names) do
    if limits[tenant] == nil then
      table.insert(unknown, tenant)
      table.insert(fields, tenant .. '|running_slots')
    end
  end
  if not unknown[1] then return end
  local own, running = redis.call('HMGET', key.tenant_limits, unpack(fields)), nil
  for at, tenant in ipairs(unknown) do
    local most = tonumber(own[at] or nil) or conf.max_running_slots_per_tenant
    limits[tenant] = false
    if most > 0 then
      running = running or redis.call('HMGET', key.running_slots, unpack(unknown))
      local used = tonumber(running[at] or nil) or 0
      limits[tenant] = {most = most, used = used, reserved = tenants.reservation(tenant, used)}
    end
  end
end

local function limit_of(limits, tenant)
  if limits[tenant] == nil then quota.learn(limits, {tenant}) end
  return limits[tenant]
end

-- Whether a tenant can have `slots` more, for the job `id` of a rank; a paused one has none. A job above its tenant's limit
-- starts while no other job of the tenant runs; otherwise it would never start.
function quota.allows(limits, tenant, slots, id, rank)
  local own = limit_of(limits, tenant)
  if pauses.has_tenant(tenant) then return false end
  if own and id and own.reserved and own.reserved.id ~= id and rank >= own.reserved.rank then return false end
  return not own or own.used <= 0 or own.used + slots <= own.most
end

-- The row of a tenant's limit, as `Limit` in `shared/queue/order/policies.py`.
function quota.row(limits, tenant)
  local limit = limit_of(limits, tenant) or {most = 0, used = 0}
  local reserved = limit.reserved
  return {limit.most, limit.used, pauses.has_tenant(tenant),
    reserved and {reserved.id, reserved.rank, reserved.slots} or cjson.null}
end

-- Count the slots of a claimed job.
function quota.use(limits, tenant, slots, id)
  local own = limits[tenant]
  if not own then return end
  own.used = own.used + slots
  if own.reserved and tenants.end_reservation(tenant, id) then own.reserved = nil end
end
