-- Part of claim and join: filling the seats of a batch from one signature's line.

local filling = {}
local LANES_READ = 64
local PASSES = 4
local READS = 600
local HOLD_BACK_MS = 60000

-- Move a job to its worker, b.worker. What is counted is noted, and written once a batch.
function filling.take(b, id, job)
  local name = key.job(id)
  local epoch = (tonumber(job.epoch) or 0) + 1
  redis.call('HSET', name, 'state', 'running', 'worker', b.worker, 'started', whole(b.now), 'epoch', epoch,
    'attempts', (tonumber(job.attempts) or 0) + 1, 'event', ending.event(id, job.tenant, 'running'))
  if job.returned or job.passed then redis.call('HDEL', name, 'returned', 'passed') end
  if job.deadline then redis.call('ZREM', key.deadlines, id) end
  table.insert(b.leases, whole(b.now + conf.lease_ms))
  table.insert(b.leases, id)
  local group = job.rank .. '|' .. job.tenant
  if not b.taken[group] then b.taken[group] = {rank = job.rank, tenant = job.tenant, jobs = 0, seats = 0} end
  b.taken[group].jobs = b.taken[group].jobs + 1
  b.taken[group].seats = b.taken[group].seats + job.seats
  b.left = b.left - job.seats
  local waited = math.max(0, math.floor(b.now - (tonumber(job.arrived) or b.now)))
  table.insert(b.claims, {id, job.job or '', job.sig, epoch, job.alone and 1 or 0, waited})
end

-- Write what the claims of a batch changed in the counters.
local function count(b)
  if not b.claims[1] then return end
  for _, group in pairs(b.taken) do line.count(b.sig, group.rank, group.tenant, -group.jobs, -group.seats) end
  redis.call('HINCRBY', key.holding, b.worker, #b.claims)
  redis.call('HINCRBY', key.sig(b.sig), 'running', #b.claims)
  line.add_all(key.leases, b.leases)
end

-- A job left over because it needs more seats than there are: it leads the next batch.
function filling.pass_over(id, now)
  redis.call('HSETNX', key.job(id), 'passed', whole(now))
  redis.call('HSETNX', key.job(id), 'returned', whole(now))
end

-- Whether seats are to be left free for a job that was passed over: it waits for longer than overdue_ms, this worker has
-- seats in use that will come free, and it has not held others back for long.
function filling.holds_back(id, worker, now)
  local passed = tonumber(redis.call('HGET', key.job(id), 'passed') or nil)
  if not passed or now - passed < conf.overdue_ms or now - passed > conf.overdue_ms + HOLD_BACK_MS then return false end
  return (tonumber(redis.call('HGET', key.holding, worker) or 0) or 0) > 0
end

-- Drop what stands in line and can no longer be run.
function filling.past(id, job, now)
  if not (job.deadline and tonumber(job.deadline) <= now) then return false end
  ending.leave_line(id, job)
  ending.finish(id, job, 'expired', now)
  return true
end

-- Take what fits of the jobs given back or passed over. b: the batch in the making.
function filling.from_front(b, rank)
  local waiting = redis.call('ZRANGEBYSCORE', key.front(b.sig), whole(rank * PRIORITY_SPAN),
    '(' .. whole((rank + 1) * PRIORITY_SPAN), 'LIMIT', 0, 64)
  for _, id in ipairs(waiting) do
    if b.left <= 0 then return end
    local job = ending.load(id)
    if not job or job.state ~= 'queued' then
      redis.call('ZREM', key.front(b.sig), id)
    elseif not filling.past(id, job, b.now) then
      if job.seats <= b.left then
        redis.call('ZREM', key.front(b.sig), id)
        filling.take(b, id, job)
      else
        filling.pass_over(id, b.now)
        if filling.holds_back(id, b.worker, b.now) then b.held = true return end
      end
    end
  end
end

-- Read the next entries of a lane into the group's hands.
local function read_entries(lane, count)
  local reply = redis.pcall('XREADGROUP', 'GROUP', 'workers', 'workers', 'COUNT', count, 'STREAMS', lane, '>')
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'NOGROUP', 1, true) then return {} end
    -- The group was lost. From 0, so that what waits is found again; entries of running jobs are told by their hash.
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

-- An entry that no job stands behind goes to the dead letters.
local function drop_stray(b, rank, lane, tenant, entry)
  line.acknowledge(lane, entry.id)
  line.count(b.sig, rank, tenant, -1, -(tonumber(entry.seats) or 1))
  ending.bury(entry.job or (b.sig .. '|' .. RANKS[rank] .. '|' .. tenant .. '|' .. entry.id), 'no_record',
    'an entry of ' .. b.sig .. ' stands for no job on record', b.now)
end

-- Claim the job of one entry, or move it to where it belongs.
local function treat(b, rank, lane, turn, entry)
  local job = entry.job and ending.load(entry.job) or nil
  if not job then
    drop_stray(b, rank, lane, turn.tenant, entry)
  elseif job.entry ~= entry.id then
    line.acknowledge(lane, entry.id)
  elseif job.state == 'queued' and not filling.past(entry.job, job, b.now) then
    if job.seats <= b.left then return filling.take(b, entry.job, job) end
    line.acknowledge(lane, entry.id)
    redis.call('HSET', key.job(entry.job), 'src', 'front', 'entry', '')
    redis.call('ZADD', key.front(b.sig), line.score(rank, tonumber(job.arrived) or b.now), entry.job)
    filling.pass_over(entry.job, b.now)
    turn.passes = turn.passes + 1
  end
end

-- Take up to `count` jobs of one lane. Returns whether there may be more.
local function from_lane(b, rank, turn, count)
  local lane = key.lane(b.sig, rank, turn.tenant)
  local enough = #b.claims + count
  while #b.claims < enough and b.left > 0 do
    local entries = read_entries(lane, enough - #b.claims)
    if not entries[1] then
      turn.drained = true
      return false
    end
    for _, entry in ipairs(entries) do treat(b, rank, lane, turn, entry) end
    turn.last = entries[#entries].id
    turn.reads = turn.reads + #entries
    if turn.passes >= PASSES or turn.reads >= READS then return false end
  end
  return b.left > 0
end

-- Tenants in the order in which they are served: the least served first, among equals the one that waits longest.
local function turns(sig, rank)
  local tenants = redis.call('ZRANGE', key.lanes(sig, rank), 0, LANES_READ - 1)
  if not tenants[1] then return {} end
  local served = redis.call('ZMSCORE', key.service, unpack(tenants))
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

-- Share the seats among the tenants that wait, until they are taken or nothing waits.
function filling.from_lanes(b, rank)
  local order = turns(b.sig, rank)
  local active = order
  -- Where every job needs one seat, as many as seats can be read at once; else one by one.
  local counted = redis.call('HMGET', key.sig(b.sig), 'jobs:' .. rank, 'seats:' .. rank)
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
      line.settle_head(b.sig, rank, turn.tenant, next_entry and next_entry[1] or nil)
    end
  end
end

-- Claim the job that was lost and is first in line, if it is its turn. Returns whether the batch is decided by that.
function filling.alone(b)
  for rank = 0, b.lowest do
    local id = line.first(key.alone(b.sig), rank)
    if id then
      local job = ending.load(id)
      if not job or job.state ~= 'queued' then
        redis.call('ZREM', key.alone(b.sig), id)
      elseif not filling.past(id, job, b.now) then
        if job.seats <= b.left then
          redis.call('ZREM', key.alone(b.sig), id)
          filling.take(b, id, job)
          return true
        end
        filling.pass_over(id, b.now)
        b.held = filling.holds_back(id, b.worker, b.now)
        return b.held
      end
    end
    -- A more urgent job goes first, unless the lost one was put off for long.
    local jobs = tonumber(redis.call('HGET', key.sig(b.sig), 'jobs:' .. rank) or 0) or 0
    if jobs > 0 and not filling.put_off(b, rank) then return false end
  end
  return false
end

function filling.put_off(b, above)
  for rank = above + 1, b.lowest do
    local id = line.first(key.alone(b.sig), rank)
    local since = id and tonumber(redis.call('HGET', key.job(id), 'returned') or nil)
    if since and b.now - since > conf.overdue_ms then return true end
  end
  return false
end

-- The seats of a batch that starts: no more than its model takes, nor than pay. Where a job needs several seats, those
-- that pay are no bound: it could never start.
local function seats_to_start(b)
  local names = {'batch'}
  for rank = 0, b.lowest do
    table.insert(names, 'jobs:' .. rank)
    table.insert(names, 'seats:' .. rank)
  end
  local state = redis.call('HMGET', key.sig(b.sig), unpack(names))
  local most = math.min(b.left, tonumber(state[1] or nil) or b.left)
  for at = 2, #state, 2 do
    if state[at] ~= state[at + 1] then return most end
  end
  return math.min(most, tonumber(redis.call('GET', key.paying(b.sig)) or nil) or most)
end

-- Fill a batch of b.sig with up to b.left seats, priorities no lower than b.lowest; b.starting: it may be one lost job.
function filling.fill(b)
  if b.starting then b.left = seats_to_start(b) end
  b.claims, b.taken, b.leases = {}, {}, {}
  if not (b.starting and filling.alone(b)) then
    for rank = 0, b.lowest do
      if b.left <= 0 or b.held then break end
      filling.from_front(b, rank)
      if not b.held then filling.from_lanes(b, rank) end
    end
  end
  count(b)
  line.refresh(b.sig, b.now)
  return b.claims
end
