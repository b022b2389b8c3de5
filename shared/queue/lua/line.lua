-- Part of the scripts that move jobs in and out of line: what waits, its counters, and when it ripens.

local line = {}
-- A stream has no front. What comes back (given back, lost) or was passed over stands in a sorted set beside the lanes,
-- which is read before them: front:<sig>, or alone:<sig> for what is to run without company. Both sort by priority, then
-- by arrival.
local PRIORITY_SPAN = 4398046511104

function line.score(rank, arrived) return string.format('%.3f', rank * PRIORITY_SPAN + arrived) end

-- Count `jobs` and `seats` more (or, negative, fewer) as waiting.
function line.count(sig, rank, tenant, jobs, seats)
  redis.call('HINCRBY', key.sig(sig), 'jobs:' .. rank, jobs)
  redis.call('HINCRBY', key.sig(sig), 'seats:' .. rank, seats)
  if redis.call('HINCRBY', key.waiting, tenant, jobs) <= 0 then redis.call('HDEL', key.waiting, tenant) end
  if redis.call('HINCRBY', key.waiting, '*', jobs) <= 0 then redis.call('HDEL', key.waiting, '*') end
end

-- Count `seats` more (or, negative, fewer) as in use by a tenant. Where some come free, signatures that were put off for want
-- of them ripen again.
function line.count_running(tenant, seats, now)
  if redis.call('HINCRBY', key.running, tenant, seats) <= 0 then redis.call('HDEL', key.running, tenant) end
  if seats >= 0 then return end
  local held = redis.call('SPOP', key.held(tenant), 16)
  for _, sig in ipairs(held) do line.refresh(sig, now) end
  if held[1] then line.wake() end
end

-- Add many members to a sorted set. rows: score, member, score, member, ...
function line.add_all(name, rows)
  for first = 1, #rows, 1000 do
    redis.call('ZADD', name, unpack(rows, first, math.min(first + 999, #rows)))
  end
end

-- Note one arrival of a signature. The jobs of one submit arrive together and are no sign of more to come.
function line.arrive(sig, window, now)
  local name = key.rhythm(sig)
  local known = redis.call('HMGET', name, 'gap', 'last')
  local since = known[2] and now - tonumber(known[2]) or nil
  local gap = rhythm.next_gap(known[1] and tonumber(known[1]) or nil, since, window)
  redis.call('HSET', name, 'last', whole(now))
  if gap then redis.call('HSET', name, 'gap', string.format('%.3f', gap)) else redis.call('HDEL', name, 'gap') end
  redis.call('PEXPIRE', name, 3600000)
end

-- The first waiting member of front:<sig> or alone:<sig> with that rank, or nil.
function line.first(name, rank)
  local found = redis.call('ZRANGEBYSCORE', name, whole(rank * PRIORITY_SPAN),
    '(' .. whole((rank + 1) * PRIORITY_SPAN), 'LIMIT', 0, 1)
  return found[1]
end

-- Since when a job given back or lost waits in that rank, or nil.
function line.returned_at(sig, rank)
  local at = nil
  for _, name in ipairs({key.front(sig), key.alone(sig)}) do
    local id = line.first(name, rank)
    if id then
      local since = tonumber(redis.call('HGET', key.job(id), 'returned') or nil) or 0
      if not at or since < at then at = since end
    end
  end
  return at
end

-- Set when the waiting jobs of a signature ripen; forget the signature when nothing of it waits or runs.
-- `arrived`: called for arrivals only, which never put off what is ripe already; nor, where `held`, do they ripen what was
-- put off for want of the tenant's seats. Returns whether a worker may want to know:
-- something ripens sooner, or arrived while its signature runs and may join.
function line.refresh(sig, now, arrived, held)
  local state = redis.call('HMGET', key.sig(sig), 'model', 'window', 'batch', 'running', 'jobs:0', 'jobs:1', 'jobs:2',
    'seats:0', 'seats:1', 'seats:2')
  local model = state[1]
  if not model then return false end
  local seats, jobs, sooner = 0, 0, false
  for rank = 0, 2 do
    seats = seats + math.max(0, tonumber(state[8 + rank] or 0) or 0)
    jobs = jobs + math.max(0, tonumber(state[5 + rank] or 0) or 0)
  end
  local shared_facts = nil
  for rank = 0, 2 do
    local ripe = key.ripe(model, rank)
    local at = nil
    if (tonumber(state[5 + rank] or 0) or 0) > 0 then
      if not shared_facts then
        local gap = redis.call('HGET', key.rhythm(sig), 'gap')
        local batch = tonumber(state[3] or nil) or math.huge
        shared_facts = {gap = gap and tonumber(gap) or nil,
          paying = math.min(batch, tonumber(redis.call('GET', key.paying(sig)) or batch) or batch)}
      end
      local head = redis.call('ZRANGE', key.lanes(sig, rank), 0, 0, 'WITHSCORES')
      local returned = line.returned_at(sig, rank)
      if head[1] or returned then
        at = rhythm.ripe_at({now = now, oldest = head[2] and tonumber(head[2]) or nil, seats = seats,
          returned = returned, window = tonumber(state[2] or 0) or 0,
          paying = shared_facts.paying, gap = shared_facts.gap})
      else
        -- Counted, but nowhere in line: an entry that was not ours left. What is not there does not wait.
        redis.call('HDEL', key.sig(sig), 'jobs:' .. rank, 'seats:' .. rank)
        jobs = jobs - tonumber(state[5 + rank])
      end
    end
    if at then
      local known = redis.call('ZSCORE', ripe, sig)
      local earlier = not known or (tonumber(known) > at and not held)
      if earlier or not arrived then redis.call('ZADD', ripe, whole(at), sig) end
      if earlier then sooner = true end
    else
      redis.call('ZREM', ripe, sig)
    end
  end
  if jobs <= 0 and (tonumber(state[4] or 0) or 0) <= 0 then
    redis.call('DEL', key.sig(sig))
    redis.call('ZREM', key.signatures, sig)
  else
    redis.call('ZADD', key.signatures, seats, sig)
  end
  return sooner or (arrived and (tonumber(state[4]) or 0) > 0)
end

-- Wake the workers: `rank` is that of the most urgent jobs that came, the first where it is not known.
function line.wake(rank)
  redis.call('XADD', key.wakeup, 'MAXLEN', '=', 16, '*', 'rank', rank or 0)
end

-- Delete a lane stream with its group when it holds nothing, neither waiting nor running.
function line.sweep_lane(lane)
  if redis.call('XLEN', lane) == 0 then
    redis.call('DEL', lane)
    return true
  end
  return false
end

-- Take an entry off its lane for good.
function line.acknowledge(lane, entry)
  redis.call('XACK', lane, 'workers', entry)
  redis.call('XDEL', lane, entry)
end

-- The id of the first undelivered entry of a lane, or nil.
function line.head(lane)
  local groups = redis.pcall('XINFO', 'GROUPS', lane)
  if groups.err or not groups[1] then return nil end
  local delivered = '0-0'
  for at = 1, #groups[1], 2 do
    if groups[1][at] == 'last-delivered-id' then delivered = groups[1][at + 1] end
  end
  local first = redis.call('XRANGE', lane, '(' .. delivered, '+', 'COUNT', 1)
  return first[1] and first[1][1] or nil
end

-- Set the place of a lane among its signature's non-empty lanes, after entries of it left.
function line.settle_head(sig, rank, tenant, head)
  if head then
    redis.call('ZADD', key.lanes(sig, rank), whole(stream_ms(head)), tenant)
  else
    redis.call('ZREM', key.lanes(sig, rank), tenant)
    line.sweep_lane(key.lane(sig, rank, tenant))
  end
end

-- How many entries of a lane wait; a lane or group that was lost holds none that could be claimed as it is.
function line.waiting_in(lane)
  local pending = redis.pcall('XPENDING', lane, 'workers')
  if pending.err then return 0 end
  return redis.call('XLEN', lane) - pending[1]
end

-- Count anew what stands in a signature's line. Returns how many counters were wrong.
function line.recount(sig)
  local wrong = 0
  for rank = 0, 2 do
    local standing = 0
    for _, tenant in ipairs(redis.call('ZRANGE', key.lanes(sig, rank), 0, 999)) do
      standing = standing + line.waiting_in(key.lane(sig, rank, tenant))
    end
    for _, name in ipairs({key.front(sig), key.alone(sig)}) do
      standing = standing + redis.call('ZCOUNT', name, line.score(rank, 0), '(' .. line.score(rank + 1, 0))
    end
    local counted = redis.call('HMGET', key.sig(sig), 'jobs:' .. rank, 'seats:' .. rank)
    local jobs, seats = tonumber(counted[1] or 0) or 0, tonumber(counted[2] or 0) or 0
    if standing ~= jobs then
      -- Seats by the mean of what was counted: they only decide how soon a batch is full.
      local mean = jobs > 0 and math.max(1, seats / jobs) or 1
      redis.call('HSET', key.sig(sig), 'jobs:' .. rank, standing, 'seats:' .. rank, whole(standing * mean))
      wrong = wrong + 1
    end
  end
  return wrong
end
