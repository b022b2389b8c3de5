-- NEEDS job_state quota
-- Part of claim and join: claim jobs of one signature for a batch.

local fill = {}
local LANES_READ = 64
local PASSES = 4
local READS = 600
local FRONT_READ, FRONT_PAGES = 64, 4
local SOLO_READ = 16
local LANE_PAGES = 4
local HOLD_BACK_MS = 60000

-- Claim a job for the worker b.worker. Counters are collected in `b` and written once per batch.
function fill.claim_job(b, id, job)
  local name = key.job(id)
  local epoch = (tonumber(job.epoch) or 0) + 1
  redis.call('HSET', name, 'state', 'running', 'worker', b.worker, 'started', whole(b.now), 'epoch', epoch,
    'attempts', (tonumber(job.attempts) or 0) + 1, 'event', job_state.event(id, job.tenant, 'running', job.webhook))
  if job.returned or job.passed then redis.call('HDEL', name, 'returned', 'passed') end
  if job.deadline then redis.call('ZREM', key.deadlines, id) end
  table.insert(b.leases, whole(b.now + conf.lease_ms))
  table.insert(b.leases, id)
  local group = job.rank .. '|' .. job.tenant
  if not b.taken[group] then b.taken[group] = {rank = job.rank, tenant = job.tenant, jobs = 0, slots = 0} end
  b.taken[group].jobs = b.taken[group].jobs + 1
  b.taken[group].slots = b.taken[group].slots + job.slots
  b.left = b.left - job.slots
  quota.use(b, job.tenant, job.slots)
  local waited = math.max(0, math.floor(b.now - (tonumber(job.arrived) or b.now)))
  table.insert(b.claims, {id, job.job or '', job.sig, epoch, job.solo and 1 or 0, waited,
    job_state.time_left(job, b.now)})
end

-- Write the counters that the claims of a batch have changed.
local function count(b)
  if not b.claims[1] then return end
  for _, group in pairs(b.taken) do
    queue.count(b.sig, group.rank, group.tenant, -group.jobs, -group.slots)
    queue.count_running(group.tenant, group.slots, b.now)
  end
  redis.call('HINCRBY', key.claimed_jobs, b.worker, #b.claims)
  redis.call('HINCRBY', key.signature(b.sig), 'running', #b.claims)
  queue.add_all(key.leases, b.leases)
end

-- Skip a job that needs more slots than are left: it leads the next batch.
function fill.skip(b, id)
  b.more = true
  redis.call('HSETNX', key.job(id), 'passed', whole(b.now))
  redis.call('HSETNX', key.job(id), 'returned', whole(b.now))
end

-- Whether to keep slots free for a skipped job: it is overdue, slots of this worker will become free, and it has not held
-- others back for HOLD_BACK_MS.
function fill.reserves_slots(id, worker, now)
  local passed = tonumber(redis.call('HGET', key.job(id), 'passed') or nil)
  if not passed or now - passed < conf.overdue_ms or now - passed > conf.overdue_ms + HOLD_BACK_MS then return false end
  return (tonumber(redis.call('HGET', key.claimed_jobs, worker) or 0) or 0) > 0
end

-- Expire a queued job whose deadline has passed; returns whether it has.
function fill.expired(id, job, now)
  if not (job.deadline and tonumber(job.deadline) <= now) then return false end
  job_state.leave_queue(id, job)
  job_state.finish(id, job, 'expired', now)
  return true
end

-- Claim the released or skipped jobs that fit. Returns how many do not because of their tenant's quota.
local function from_standing(b, ids)
  local short = 0
  for _, id in ipairs(ids) do
    if b.left <= 0 or b.held then return 0 end
    local job = job_state.load(id)
    if not job or job.state ~= 'queued' then
      redis.call('ZREM', key.front(b.sig), id)
    elseif not fill.expired(id, job, b.now) then
      if not quota.allows(b, job.tenant, job.slots) then
        short = short + 1
      elseif job.slots <= b.left then
        redis.call('ZREM', key.front(b.sig), id)
        fill.claim_job(b, id, job)
      else
        fill.skip(b, id)
        b.held = fill.reserves_slots(id, b.worker, b.now)
      end
    end
  end
  return short
end

-- Claim from front:<sig> what fits into the batch `b`.
function fill.from_front(b, rank)
  local skipped = 0
  for _ = 1, FRONT_PAGES do
    local short = from_standing(b, queue.of_rank(key.front(b.sig), rank, skipped, FRONT_READ))
    if short == 0 then return end
    skipped = skipped + short
  end
end

-- Read the next entries of a lane through its group.
local function read_entries(lane, count)
  local reply = redis.pcall('XREADGROUP', 'GROUP', 'workers', 'workers', 'COUNT', count, 'STREAMS', lane, '>')
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'NOGROUP', 1, true) then return {} end
    -- The group was lost. Read from 0, to find queued jobs again; entries of running jobs are known by the job's hash.
    if redis.call('EXISTS', lane) == 0 then return {} end
    redis.call('XGROUP', 'CREATE', lane, 'workers', '0')
    reply = redis.call('XREADGROUP', 'GROUP', 'workers', 'workers', 'COUNT', count, 'STREAMS', lane, '>')
  end
  local entries = {}
  for at, row in ipairs(reply and reply[1] and reply[1][2] or {}) do
    entries[at] = {id = row[1]}
    local fields = row[2] or {}
    for place = 1, #fields, 2 do entries[at][fields[place]] = fields[place + 1] end
  end
  return entries
end

-- Move an entry without a job to the dead letters.
local function bury_entry(b, rank, lane, tenant, entry)
  queue.acknowledge(lane, entry.id)
  queue.count(b.sig, rank, tenant, -1, -(tonumber(entry.slots) or 1))
  job_state.bury(entry.job or (b.sig .. '|' .. RANKS[rank] .. '|' .. tenant .. '|' .. entry.id), 'no_record',
    'entry without a job: ' .. b.sig, b.now)
end

-- Claim the job of an entry, or move it to front:<sig> if it does not fit.
local function claim_entry(b, rank, lane, turn, entry)
  local job = entry.job and job_state.load(entry.job) or nil
  if not job then
    bury_entry(b, rank, lane, turn.tenant, entry)
  elseif job.entry ~= entry.id then
    queue.acknowledge(lane, entry.id)
  elseif job.state == 'queued' and not fill.expired(entry.job, job, b.now) then
    if job.slots <= b.left then return fill.claim_job(b, entry.job, job) end
    queue.acknowledge(lane, entry.id)
    redis.call('HSET', key.job(entry.job), 'src', 'front', 'entry', '')
    redis.call('ZADD', key.front(b.sig), queue.score(rank, tonumber(job.arrived) or b.now), entry.job)
    queue.note_moves(b.sig, rank, job.tenant, 1)
    fill.skip(b, entry.job)
    turn.passes = turn.passes + 1
  end
end

-- The slots that the next entry of a lane needs; nil without one or when the lane's group was lost.
local function next_slots(lane, last)
  local head = last and '(' .. last or queue.head(lane)
  local row = head and redis.call('XRANGE', lane, head, '+', 'COUNT', 1)[1]
  for place = 1, row and #row[2] or 0, 2 do
    if row[2][place] == 'slots' then return tonumber(row[2][place + 1]) end
  end
end

-- Claim up to `count` jobs of a lane. Returns whether there can be more.
local function from_lane(b, rank, turn, count)
  local lane = key.lane(b.sig, rank, turn.tenant)
  local enough = #b.claims + count
  while #b.claims < enough and b.left > 0 do
    local at_once = enough - #b.claims
    if quota.bound(b, turn.tenant) then
      -- Check before reading: an entry that was read has left the queue.
      local slots = next_slots(lane, turn.last)
      if slots and not quota.allows(b, turn.tenant, slots) then return false end
      at_once = 1
    end
    local entries = read_entries(lane, at_once)
    if not entries[1] then
      turn.drained = true
      return false
    end
    for _, entry in ipairs(entries) do claim_entry(b, rank, lane, turn, entry) end
    turn.last = entries[#entries].id
    turn.reads = turn.reads + #entries
    if turn.passes >= PASSES or turn.reads >= READS then
      b.more = true
      return false
    end
  end
  return b.left > 0
end

-- The longest-waiting tenants whose quota allows another slot.
local function eligible(b, rank)
  for page = 0, LANE_PAGES - 1 do
    local tenants = redis.call('ZRANGE', key.lanes(b.sig, rank), page * LANES_READ, (page + 1) * LANES_READ - 1)
    quota.learn(b, tenants)
    local free = {}
    for _, tenant in ipairs(tenants) do if quota.allows(b, tenant, 1) then table.insert(free, tenant) end end
    if #tenants < LANES_READ then return free end
    if free[1] then
      b.more = true
      return free
    end
  end
  b.more = true
  return {}
end

-- Tenants in serving order: the least GPU usage first, then the longest wait.
local function turns(b, rank)
  local tenants = eligible(b, rank)
  if not tenants[1] then return {} end
  local served = redis.call('ZMSCORE', key.gpu_usage, unpack(tenants))
  local order = {}
  for at, tenant in ipairs(tenants) do
    order[at] = {tenant = tenant, at = at, passes = 0, reads = 0, served = served[at] and tonumber(served[at]) or -math.huge}
  end
  table.sort(order, function(a, b)
    if a.served ~= b.served then return a.served < b.served end
    return a.at < b.at
  end)
  return order
end

-- Share the slots among the tenants with queued jobs.
function fill.from_lanes(b, rank)
  local order = turns(b, rank)
  local active = order
  -- If every job needs one slot, as many entries as slots can be read at once; otherwise one by one.
  local counted = redis.call('HMGET', key.signature(b.sig), 'jobs:' .. rank, 'slots:' .. rank)
  local single = counted[1] == counted[2]
  while b.left > 0 and active[1] do
    local again = {}
    local share = single and math.max(1, math.floor(b.left / #active)) or 1
    for _, turn in ipairs(active) do
      if b.left <= 0 then break end
      if from_lane(b, rank, turn, math.min(share, b.left)) then table.insert(again, turn) end
    end
    active = again
  end
  for _, turn in ipairs(order) do
    if turn.last or turn.drained then
      local lane = key.lane(b.sig, rank, turn.tenant)
      local next_entry = nil
      if turn.last then next_entry = redis.call('XRANGE', lane, '(' .. turn.last, '+', 'COUNT', 1)[1] end
      queue.update_lane(b.sig, rank, turn.tenant, next_entry and next_entry[1] or nil)
    end
  end
end

-- The first lost job whose tenant's quota allows its slots.
local function first_solo(b, rank)
  for _, id in ipairs(queue.of_rank(key.solo(b.sig), rank, 0, SOLO_READ)) do
    local job = job_state.load(id)
    if not job or job.state ~= 'queued' then
      redis.call('ZREM', key.solo(b.sig), id)
    elseif not fill.expired(id, job, b.now) and quota.allows(b, job.tenant, job.slots) then
      return id, job
    end
  end
end

-- Claim the first lost job, if it is next. Returns whether that decides the batch.
function fill.solo(b)
  for rank = 0, b.lowest do
    local id, job = first_solo(b, rank)
    if id then
      if job.slots <= b.left then
        redis.call('ZREM', key.solo(b.sig), id)
        fill.claim_job(b, id, job)
        return true
      end
      fill.skip(b, id)
      b.held = fill.reserves_slots(id, b.worker, b.now)
      return b.held
    end
    -- Jobs of a higher priority go first, unless the lost job is overdue.
    local jobs = tonumber(redis.call('HGET', key.signature(b.sig), 'jobs:' .. rank) or 0) or 0
    if jobs > 0 and not fill.overdue_below(b, rank) then return false end
  end
  return false
end

function fill.overdue_below(b, above)
  for rank = above + 1, b.lowest do
    local id = queue.first(key.solo(b.sig), rank)
    local since = id and tonumber(redis.call('HGET', key.job(id), 'returned') or nil)
    if since and b.now - since > conf.overdue_ms then return true end
  end
  return false
end

-- The slots of a new batch: at most the model's maximum and the efficient rows. If a job needs several slots, efficient
-- rows are no limit: the job could never start.
local function slots_to_start(b)
  local names = {'batch'}
  for rank = 0, b.lowest do
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

-- Claim up to b.left slots of b.sig with ranks up to b.lowest. With b.starting the batch can be one lost job, unless its
-- worker has other jobs (b.has_other_jobs).
function fill.fill(b)
  if b.starting then b.left = slots_to_start(b) end
  b.claims, b.taken, b.leases, b.quotas, b.short = {}, {}, {}, {}, {}
  local solo = b.starting and not b.has_other_jobs and fill.solo(b)
  if not solo then
    for rank = 0, b.lowest do
      if b.left <= 0 or b.held then break end
      fill.from_front(b, rank)
      if not b.held then fill.from_lanes(b, rank) end
    end
  end
  count(b)
  queue.refresh(b.sig, b.now)
  if not solo then quota.defer(b) end
  return b.claims
end
