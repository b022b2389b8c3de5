-- NEEDS job_state
-- The position of a queued job among its signature's jobs.
-- ARGV     job_id
-- Returns  {jobs before it, ms until its end | -1}, or {} if it is not queued
local READ = 500
local id, now = ARGV[1], clock_ms()
local job = job_state.load(id)
if not job or job.state ~= 'queued' then return {} end

local function queued(rank)
  return math.max(0, tonumber(redis.call('HGET', key.signature(job.sig), 'jobs:' .. rank) or 0) or 0)
end

-- Released, skipped and lost jobs of this priority go first.
local function front_of(name)
  return redis.call('ZCOUNT', name, queue.score(job.rank, 0), '(' .. queue.score(job.rank + 1, 0))
end

-- How many entries of its lane precede its own, and how many are queued there.
local function ahead_in_lane(lane)
  local head = queue.head(lane)
  if not head then return 0, 1 end
  local pending = redis.call('XPENDING', lane, 'workers')[1]
  local total = math.max(1, redis.call('XLEN', lane) - pending)
  local rows = redis.call('XRANGE', lane, head, job.entry, 'COUNT', READ + 1)
  if #rows <= READ or rows[#rows][1] == job.entry then return math.max(0, #rows - 1), total end
  local tail = stream_ms(redis.call('XREVRANGE', lane, '+', '-', 'COUNT', 1)[1][1])
  local first, mine = stream_ms(head), stream_ms(job.entry)
  local share = tail > first and (mine - first) / (tail - first) or 0.5
  return math.min(total - 1, math.max(READ, math.floor(share * total))), total
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
local gap = tonumber(redis.call('HGET', key.arrivals(job.sig), 'done_gap') or nil)
if not gap then return {before, -1} end
local running = tonumber(redis.call('HGET', key.signature(job.sig), 'running') or 0) or 0
return {before, math.ceil(gap * (before + running + 1))}
