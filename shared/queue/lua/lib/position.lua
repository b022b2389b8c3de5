-- NEEDS queue
-- Part of the scripts that return the positions of queued jobs.

local position = {}
local READ = 32 -- entries
local FACTS = {'state', 'sig', 'rank', 'tenant', 'src', 'entry', 'arrived', 'slots', 'start_by'}

-- Released, skipped, lost and dated jobs of this priority go first.
local function front_of(name, rank)
  return redis.call('ZCOUNT', name, queue.score(rank, 0), '(' .. queue.score(rank + 1, 0))
end

-- How many entries of its lane precede a job's own, and how many there are. Far ones are not read: the numbers of the
-- entries count instead, and with them those that were canceled meanwhile.
local function ahead_in_lane(lane, entry)
  local head = redis.call('XRANGE', lane, '-', '+', 'COUNT', 1)[1]
  if not head or (entry or '') == '' then return 0, 1 end
  local total = redis.call('XLEN', lane)
  local first = tonumber(queue.value_of(head, 'number'))
  local mine = tonumber(queue.value_of(redis.call('XRANGE', lane, entry, entry)[1], 'number'))
  if first and mine and mine - first > READ then return math.min(total - 1, mine - first), total end
  return math.max(0, #redis.call('XRANGE', lane, head[1], entry, 'COUNT', READ + 1) - 1), total
end

-- Jobs of its signature and priority before a job; `queued` are all of them.
local function before_in_rank(job, queued)
  if job.src == 'lane' then
    local ahead, mine = ahead_in_lane(key.lane(job.sig, job.rank, job.tenant), job.entry)
    local front = front_of(key.front(job.sig), job.rank) + front_of(key.solo(job.sig), job.rank) +
      front_of(key.dated(job.sig), job.rank)
    local others = math.max(0, queued - front - mine)
    local lanes = math.max(0, redis.call('ZCARD', key.lanes(job.sig, job.rank)) - 1)
    -- Tenants take turns: another tenant precedes it at most as often as its own tenant does.
    return front + ahead + math.min(others, ahead * lanes)
  end
  local before, order = job.src == 'solo' and 0 or front_of(key.solo(job.sig), job.rank), job.arrived
  if job.src == 'dated' then before, order = before + front_of(key.front(job.sig), job.rank), job.start_by end
  return before + redis.call('ZCOUNT', queue.set_of(job), queue.score(job.rank, 0),
    '(' .. queue.score(job.rank, tonumber(order)))
end

-- {jobs before it, ms until its end | -1, ready, without free slots of its tenant, must run solo, paused}, or {} if it is not
-- queued
function position.of(id)
  local values, job = redis.call('HMGET', key.job(id), unpack(FACTS)), {}
  for at, name in ipairs(FACTS) do job[name] = values[at] end
  if job.state ~= 'queued' then return {} end
  job.rank, job.slots = tonumber(job.rank), tonumber(job.slots)
  local of_sig = redis.call('HMGET', key.signature(job.sig), 'jobs:0', 'jobs:1', 'jobs:2', 'running', 'model')
  local function queued(rank) return math.max(0, tonumber(of_sig[rank + 1] or 0) or 0) end

  local before = before_in_rank(job, queued(job.rank))
  for rank = 0, job.rank - 1 do before = before + queued(rank) end
  local ready_at = tonumber(redis.call('ZSCORE', key.ready(of_sig[5] or '', job.rank), job.sig) or nil)
  local free = quota.allows({}, job.tenant, job.slots, id, job.rank)
  local paused = pauses.has_model(of_sig[5] or '') or pauses.has_tenant(job.tenant)
  local gap = tonumber(redis.call('HGET', key.arrivals(job.sig), 'done_gap') or nil)
  return {before, gap and math.ceil(gap * (before + (tonumber(of_sig[4] or 0) or 0) + 1)) or -1,
    ready_at and ready_at <= clock_ms() and 1 or 0, free and 0 or 1, job.src == 'solo' and 1 or 0, paused and 1 or 0}
end
