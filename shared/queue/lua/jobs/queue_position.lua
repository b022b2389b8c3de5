-- NEEDS queue
-- The position of a queued job among its signature's jobs, and what else delays it.
-- ARGV     job_id
-- Returns  {jobs before it, ms until its end | -1, ready, without free slots of its tenant, must run solo}, or {} if it is
--          not queued
local READ = 32 -- entries
local known = redis.call('HMGET', key.job(ARGV[1]), 'state', 'sig', 'rank', 'tenant', 'src', 'entry', 'arrived', 'slots')
if known[1] ~= 'queued' then return {} end
local job = {sig = known[2], rank = tonumber(known[3]), tenant = known[4], src = known[5], entry = known[6], arrived = known[7],
  slots = tonumber(known[8])}
local of_sig = redis.call('HMGET', key.signature(job.sig), 'jobs:0', 'jobs:1', 'jobs:2', 'running', 'model')

local function queued(rank)
  return math.max(0, tonumber(of_sig[rank + 1] or 0) or 0)
end

-- Released, skipped and lost jobs of this priority go first.
local function front_of(name)
  return redis.call('ZCOUNT', name, queue.score(job.rank, 0), '(' .. queue.score(job.rank + 1, 0))
end

local function number_of(row)
  for at = 1, row and #row[2] or 0, 2 do
    if row[2][at] == 'number' then return tonumber(row[2][at + 1]) end
  end
end

-- How many entries of its lane precede its own, and how many are queued there. Far ones are not read: the numbers of the
-- entries count instead, and with them those that were canceled meanwhile.
local function ahead_in_lane(lane)
  local head, pending = queue.first_entry(lane)
  if not head then return 0, 1 end
  local total = math.max(1, redis.call('XLEN', lane) - pending)
  local first, mine = number_of(head), number_of(redis.call('XRANGE', lane, job.entry, job.entry)[1])
  if first and mine and mine - first > READ then return math.min(total - 1, mine - first), total end
  return math.max(0, #redis.call('XRANGE', lane, head[1], job.entry, 'COUNT', READ + 1) - 1), total
end

local before = 0
for rank = 0, job.rank - 1 do before = before + queued(rank) end
if job.src == 'lane' then
  local lane = key.lane(job.sig, job.rank, job.tenant)
  local ahead, mine = ahead_in_lane(lane)
  local front = front_of(key.front(job.sig)) + front_of(key.solo(job.sig))
  local others = math.max(0, queued(job.rank) - front - mine)
  local lanes = math.max(0, redis.call('ZCARD', key.lanes(job.sig, job.rank)) - 1)
  -- Tenants take turns: another tenant precedes it at most as often as its own tenant does.
  before = before + front + ahead + math.min(others, ahead * lanes)
else
  local name = job.src == 'solo' and key.solo(job.sig) or key.front(job.sig)
  if job.src ~= 'solo' then before = before + front_of(key.solo(job.sig)) end
  before = before + redis.call('ZCOUNT', name, queue.score(job.rank, 0), '(' .. queue.score(job.rank, tonumber(job.arrived)))
end

local ready_at = tonumber(redis.call('ZSCORE', key.ready(of_sig[5] or '', job.rank), job.sig) or nil)
local free = quota.allows({quotas = {}, short = {}}, job.tenant, job.slots)
local gap = tonumber(redis.call('HGET', key.arrivals(job.sig), 'done_gap') or nil)
return {before, gap and math.ceil(gap * (before + (tonumber(of_sig[4] or 0) or 0) + 1)) or -1,
  ready_at and ready_at <= clock_ms() and 1 or 0, free and 0 or 1, job.src == 'solo' and 1 or 0}
