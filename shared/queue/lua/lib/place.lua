-- NEEDS queue device_times
-- Part of the scripts that return what decides the positions of queued jobs: `shared/queue/order/position.py` decides.

local place = {}
local NEAR = 32 -- entries
local FACTS = {'state', 'sig', 'rank', 'tenant', 'src', 'entry', 'slots', 'model', 'parents', 'wait_until', 'step', 'total'}

local function number_of(lane, first, last)
  return tonumber(queue.value_of(redis.call('XRANGE', lane, first, last, 'COUNT', 1)[1], 'number'))
end

-- Entries before one of a stream. Far ones are not read: the difference of their numbers counts removed ones, too.
local function before_entry(lane, entry)
  if (entry or '') == '' then return 0 end
  local first, own = number_of(lane, '-', '+'), number_of(lane, entry, entry)
  if first and own and own - first > NEAR then return own - first end
  return math.max(0, #redis.call('XRANGE', lane, '-', entry, 'COUNT', NEAR + 1) - 1)
end

-- Jobs before one in a set by priority, of its rank.
local function before_of_rank(name, rank, id)
  return math.max(0, (redis.call('ZRANK', name, id) or 0) - redis.call('ZCOUNT', name, '-inf', '(' .. queue.score(rank, 0)))
end

-- The work, in jobs, that the checkpoints of a job and of jobs before it have spared: of lost ones of its rank, and of those of
-- its lane that were returned.
local function spared(id, sig, rank, src, before, returned)
  local sum, ids = 0, queue.of_rank(key.solo(sig), rank, 0, src == 'solo' and math.min(before, NEAR) or NEAR)
  local count = src == 'lane' and NEAR or math.min(before, NEAR)
  for _, one in ipairs(src == 'solo' and {} or redis.call('ZRANGEBYSCORE', returned, '-inf', '(' .. queue.score(2, 0),
    'LIMIT', 0, count)) do
    table.insert(ids, one)
  end
  table.insert(ids, id)
  for _, one in ipairs(ids) do sum = sum + 1 - (tonumber(redis.call('HGET', key.job(one), 'left') or nil) or 1) end
  return sum
end

local function load(id)
  local values, job = redis.call('HMGET', key.job(id), unpack(FACTS)), {}
  for at, name in ipairs(FACTS) do job[name] = values[at] or nil end
  return job
end

local function is_in_lane(job) return job.state == 'queued' and job.src ~= 'paused' and job.src ~= 'waiting' end

-- The facts of a job in a lane. One that waits has those that it would have if it were the last in its lane now.
local function facts_of(id, job)
  local sig, rank, tenant, src = job.sig, tonumber(job.rank), job.tenant, job.src or 'front'
  local lane, returned = key.lane(sig, rank, tenant), key.returned(sig, rank, tenant)
  local state = redis.call('HMGET', key.signature(sig), 'model', 'running', 'jobs:0', 'jobs:1', 'jobs:2')
  for at = 2, 5 do state[at] = math.max(0, tonumber(state[at] or 0) or 0) end
  local order, in_stream, before = key.lane_order(sig, rank), redis.call('XLEN', lane), nil
  if src == 'waiting' then
    src, before, in_stream, state[3 + rank] = 'lane', in_stream, in_stream + 1, state[3 + rank] + 1
  elseif src == 'lane' then
    before = before_entry(lane, job.entry)
  elseif src == 'solo' then
    before = before_of_rank(key.solo(sig), rank, id)
  else
    before = redis.call('ZRANK', returned, id) or 0
  end
  return {now_ms = clock_ms(), id = id, place = src, rank = rank, slots = tonumber(job.slots),
    model_paused = pauses.has_model(state[1] or ''), limit = quota.row({}, tenant), jobs = {state[3], state[4], state[5]},
    running = state[2], ready_ms = tonumber(redis.call('ZSCORE', key.ready(state[1] or '', rank), sig) or nil) or cjson.null,
    gap_ms = tonumber(redis.call('HGET', key.arrivals(sig), 'done_gap') or nil) or cjson.null,
    lost = redis.call('ZCOUNT', key.solo(sig), queue.score(rank, 0), '(' .. queue.score(rank + 1, 0)),
    returned = redis.call('ZCOUNT', returned, '-inf', '(' .. queue.score(2, 0)), in_stream = in_stream,
    before = before, tenants = redis.call('ZCARD', order), less_served = redis.call('ZRANK', order, tenant) or 0,
    spared = queue.has_returned(sig) and spared(id, sig, rank, src, before, returned) or 0}
end

-- The facts of a job as JSON of `PlaceFacts` in `shared/queue/order/facts.py`; '' if it is in no lane.
function place.of(id)
  local job = load(id)
  return is_in_lane(job) and cjson.encode(facts_of(id, job)) or ''
end

-- The part of a running job's steps that is left.
local function left_of(job)
  local total = tonumber(job.total or nil) or 0
  return total > 0 and math.max(0, 1 - (tonumber(job.step or nil) or 0) / total) or 1
end

-- The mean time of a job of a signature, or without one that between the ends of its jobs (ms).
local function run_ms(sig)
  local mean = device_times.means(device_times.of(sig), clock_ms())
  return mean > 0 and mean or tonumber(redis.call('HGET', key.arrivals(sig), 'done_gap') or nil)
end

-- How many jobs have waited longer for the same parent: the most of all parents.
local function siblings_before(id, parents)
  local most = 0
  for parent in string.gmatch(parents, '%S+') do
    most = math.max(most, redis.call('ZRANK', key.children(parent), id) or 0)
  end
  return most
end

-- The row of a job, as `UnfinishedJob` in `shared/queue/order/facts.py`.
function place.row(id)
  local job = load(id)
  local row = {id = id, state = job.state, model = job.model or '', parents = ''}
  if job.state == 'running' then
    row.run_ms, row.left = run_ms(job.sig), left_of(job)
  elseif job.state ~= 'queued' then
    row.state = 'ended'
  elseif job.src == 'paused' then
    row.state = 'paused'
  else
    row.place = facts_of(id, job)
    if job.src == 'waiting' then
      row.state, row.due_ms, row.run_ms = 'waiting', tonumber(job.wait_until), run_ms(job.sig)
      row.parents, row.siblings = job.parents or '', siblings_before(id, job.parents or '')
    end
  end
  return row
end
