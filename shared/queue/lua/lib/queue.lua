-- NEEDS readiness recount tenants wakeups dated
-- Part of the scripts that queue jobs or remove them: counters, lanes and readiness.

local queue = {}
-- A stream has no front. Returned jobs are outside their lane's stream and go before it: released, skipped and moved ones
-- are in front:<sig>, lost ones in solo:<sig>, by priority, then by arrival. Jobs with a deadline that were not returned are in
-- dated:<sig>, by priority, then by latest start. All are in returned:<lane> as well, dated ones after returned ones and lost
-- ones last, which is read before the lane's stream. A job's field `returned` is since when it was returned.
local PRIORITY_SPAN = 4398046511104

function queue.score(rank, arrived) return string.format('%.3f', rank * PRIORITY_SPAN + arrived) end

-- Note for a recount in progress that queued jobs change their place.
function queue.note_moves(sig, rank, tenant, jobs)
  if not recount.in_progress() then return end
  for _, counter in ipairs({'jobs|' .. sig .. '|' .. rank, 'queued|' .. tenant, 'queued|*'}) do recount.note(counter, jobs) end
end

local function add(counter, by, amount)
  counter[by] = (counter[by] or 0) + amount
end

-- Add jobs and slots, which can be negative, to the queued ones of a signature. groups: rank, tenant, jobs, slots of each.
function queue.count_all(sig, groups)
  local jobs, slots, of_tenant = {}, {}, {}
  for _, group in pairs(groups) do
    if group.jobs ~= 0 then
      queue.note_moves(sig, group.rank, group.tenant, group.jobs)
      add(jobs, group.rank, group.jobs)
      add(slots, group.rank, group.slots)
      add(of_tenant, group.tenant, group.jobs)
      add(of_tenant, '*', group.jobs)
    end
  end
  for rank, amount in pairs(jobs) do
    -- Below 0: the counters were lost.
    if redis.call('HINCRBY', key.signature(sig), 'jobs:' .. rank, amount) < 0 then
      redis.call('HDEL', key.signature(sig), 'jobs:' .. rank, 'slots:' .. rank)
    else
      redis.call('HINCRBY', key.signature(sig), 'slots:' .. rank, slots[rank])
    end
  end
  for tenant, amount in pairs(of_tenant) do
    if redis.call('HINCRBY', key.queued_jobs, tenant, amount) <= 0 then redis.call('HDEL', key.queued_jobs, tenant) end
  end
end

function queue.count(sig, rank, tenant, jobs, slots)
  queue.count_all(sig, {{rank = rank, tenant = tenant, jobs = jobs, slots = slots}})
end

-- Add `slots`, which can be negative, to a tenant's running slots. Freed slots end the deferral of a tenant at its quota.
function queue.count_running(tenant, slots)
  if recount.in_progress() then recount.note('running|' .. tenant, slots) end
  if redis.call('HINCRBY', key.running_slots, tenant, slots) <= 0 then redis.call('HDEL', key.running_slots, tenant) end
  if slots < 0 and tenants.resume(tenant) then wakeups.wake_noted() end
end

-- Add many members to a sorted set. rows: score, member, score, member, ...
function queue.add_all(name, rows)
  for first = 1, #rows, 1000 do redis.call('ZADD', name, unpack(rows, first, math.min(first + 999, #rows))) end
end

-- Record an arrival of a signature. The jobs of one submit count once: they do not predict more.
function queue.record_arrival(sig, window, now)
  local name = key.arrivals(sig)
  local known = redis.call('HMGET', name, 'gap', 'last', 'done')
  local since = known[2] and now - tonumber(known[2]) or nil
  local gap = readiness.next_gap(known[1] and tonumber(known[1]) or nil, since, window)
  redis.call('HSET', name, 'last', whole(now))
  if gap then redis.call('HSET', name, 'gap', string.format('%.3f', gap)) else redis.call('HDEL', name, 'gap') end
  -- Without a job that has ended, only the next arrivals read it: a client can vary signatures without end.
  redis.call('PEXPIRE', name, known[3] and 3600000 or whole(60000 + 10 * window))
end

-- `count` members of front:<sig>, solo:<sig> or dated:<sig> with that rank, after the first `skipped`.
function queue.of_rank(name, rank, skipped, count)
  return redis.call('ZRANGEBYSCORE', name, whole(rank * PRIORITY_SPAN), '(' .. whole((rank + 1) * PRIORITY_SPAN),
    'LIMIT', skipped, count)
end

-- Whether jobs of a signature are queued outside of the streams of their lanes.
function queue.has_returned(sig) return redis.call('EXISTS', key.front(sig), key.solo(sig), key.dated(sig)) > 0 end

-- Since when the first returned job (released, skipped or lost) of that rank is there, or nil.
function queue.returned_at(sig, rank)
  local at = nil
  for _, name in ipairs({key.front(sig), key.solo(sig)}) do
    local id = queue.of_rank(name, rank, 0, 1)[1]
    if id then at = math.min(at or math.huge, tonumber(redis.call('HGET', key.job(id), 'returned') or nil) or 0) end
  end
  return at
end

-- Whether a lane or a set has a job of a signature with that rank, whatever its counters say.
local function has_jobs(sig, rank)
  local tenant = redis.call('ZRANGE', key.lanes(sig, rank), 0, 0)[1]
  if tenant and redis.call('EXISTS', key.lane(sig, rank, tenant)) == 1 then return true end
  for _, name in ipairs({key.front(sig), key.solo(sig), key.dated(sig)}) do
    local id = queue.of_rank(name, rank, 0, 1)[1]
    if id and redis.call('EXISTS', key.job(id)) == 1 then return true end
  end
  return false
end

-- Count one job and slot of each rank that has jobs, where the counters of a signature say that nothing is queued or running:
-- they were lost. So its jobs are ready before a recount.
local function count_lost(sig, state)
  if state[4] + state[5] + state[6] + state[7] > 0 then return end
  for rank = 0, 2 do
    if has_jobs(sig, rank) then
      redis.call('HSET', key.signature(sig), 'jobs:' .. rank, 1, 'slots:' .. rank, 1)
      state[5 + rank], state[8 + rank] = 1, 1
    end
  end
end

-- Update the readiness of a signature, and delete the signature when nothing of it is queued or running. `arrived`: an
-- arrival never delays what is ready. Returns whether to wake workers, as jobs are ready earlier after an arrival or have
-- arrived while their signature runs, and when its first jobs are ready.
function queue.refresh(sig, now, arrived)
  local state = redis.call('HMGET', key.signature(sig), 'model', 'window', 'batch', 'running', 'jobs:0', 'jobs:1', 'jobs:2',
    'slots:0', 'slots:1', 'slots:2')
  local model, first_ready, ready_earlier = state[1], math.huge, false
  if not model then return false, first_ready end
  for at = 4, 10 do state[at] = math.max(0, tonumber(state[at] or nil) or 0) end
  count_lost(sig, state)
  local jobs, slots = state[5] + state[6] + state[7], state[8] + state[9] + state[10]
  local shared_facts, has_returned = nil, jobs > 0 and queue.has_returned(sig)
  for rank = 0, 2 do
    local ready = key.ready(model, rank)
    local at = nil
    if state[5 + rank] > 0 then
      if not shared_facts then
        local gap = redis.call('HGET', key.arrivals(sig), 'gap')
        local max_batch = tonumber(state[3] or nil) or math.huge
        shared_facts = {gap = gap and tonumber(gap) or nil,
          efficient_rows = math.min(max_batch, tonumber(redis.call('GET', key.efficient_rows(sig)) or max_batch)
            or max_batch)}
      end
      local head = redis.call('ZRANGE', key.lanes(sig, rank), 0, 0, 'WITHSCORES')
      local returned, own = nil, nil
      if has_returned then returned, own = queue.returned_at(sig, rank), dated.facts(sig, rank) end
      if head[1] or returned or own then
        local oldest = math.min(head[2] and tonumber(head[2]) or math.huge, own and own.oldest or math.huge)
        at = readiness.ready_at({now = now, oldest = oldest < math.huge and oldest or nil, slots = slots,
          returned = returned, start_by = own and own.start_by, window = tonumber(state[2] or 0) or 0,
          efficient_rows = shared_facts.efficient_rows, gap = shared_facts.gap})
      else
        -- Counted, but in no lane or set: the entry was removed by another program.
        redis.call('HDEL', key.signature(sig), 'jobs:' .. rank, 'slots:' .. rank)
        jobs = jobs - state[5 + rank]
      end
    end
    if at then
      first_ready = math.min(first_ready, at)
      if not arrived then
        redis.call('ZADD', ready, whole(at), sig)
      elseif redis.call('ZADD', ready, 'LT', 'CH', whole(at), sig) == 1 then
        ready_earlier = true
      end
    else
      redis.call('ZREM', ready, sig)
    end
  end
  if jobs <= 0 and state[4] <= 0 then
    redis.call('DEL', key.signature(sig))
    redis.call('ZREM', key.signatures, sig)
  else
    redis.call('ZADD', key.signatures, slots, sig)
  end
  local wake = ready_earlier or (arrived and state[4] > 0)
  if wake or (jobs > 0 and not arrived) then wakeups.note(sig) end
  return wake, first_ready
end

-- Remove an entry from its lane.
function queue.remove_entry(lane, entry)
  if (entry or '') ~= '' then redis.call('XDEL', lane, entry) end
end

-- A field of a stream's entry, or nil.
function queue.value_of(entry, name)
  for at = 1, entry and #entry[2] or 0, 2 do
    if entry[2][at] == name then return entry[2][at + 1] end
  end
  return nil
end

-- The number of a lane's last entry; queue positions are differences of these numbers.
function queue.last_number(lane)
  local last = redis.call('XREVRANGE', lane, '+', '-', 'COUNT', 1)[1]
  return tonumber(queue.value_of(last, 'number')) or 0
end

-- Append the entry of a job to the stream of its lane; returns its id, or an error if the stream has a later one.
function queue.append(id, job, entry)
  local lane = key.lane(job.sig, job.rank, job.tenant)
  return redis.pcall('XADD', lane, entry, 'job', id, 'slots', job.slots, 'number', queue.last_number(lane) + 1)
end

-- Add a returned job (released, skipped or lost) or a dated one to the front of its signature and of its lane.
function queue.add_returned(id, job, arrived)
  local set, kind, order = key.front(job.sig), 0, arrived
  if job.src == 'dated' then set, kind, order = key.dated(job.sig), 1, job.start_by end
  if job.src == 'solo' then set, kind = key.solo(job.sig), 2 end
  redis.call('ZADD', set, queue.score(job.rank, order), id)
  redis.call('ZADD', key.returned(job.sig, job.rank, job.tenant), queue.score(kind, order), id)
end

-- job.src can be nil: in any of the sets.
function queue.remove_returned(id, job)
  if job.src ~= 'dated' then
    redis.call('ZREM', key.front(job.sig), id)
    redis.call('ZREM', key.solo(job.sig), id)
  end
  if not job.src or job.src == 'dated' then redis.call('ZREM', key.dated(job.sig), id) end
  redis.call('ZREM', key.returned(job.sig, job.rank, job.tenant), id)
end

-- Remove a queued job from the stream of its lane, or from the sets of those that are outside of it.
function queue.remove(id, job)
  if job.src ~= 'lane' then return queue.remove_returned(id, job) end
  queue.remove_entry(key.lane(job.sig, job.rank, job.tenant), job.entry)
end

-- Update the indexes of a lane (its model, sig, rank and tenant) after entries or returned jobs were added or removed. `remove`
-- collects tenants to remove by index.
local function update_lane(lane, remove)
  local stream = key.lane(lane.sig, lane.rank, lane.tenant)
  local head = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local oldest = head and stream_ms(head[1]) or math.huge
  if head then
    redis.call('ZADD', key.lanes(lane.sig, lane.rank), whole(oldest), lane.tenant)
  else
    remove(key.lanes(lane.sig, lane.rank), lane.tenant)
    redis.call('DEL', stream)
  end
  local returned = redis.call('ZRANGE', key.returned(lane.sig, lane.rank, lane.tenant), 0, 0, 'WITHSCORES')
  local placed = nil
  if returned[1] then
    local first, start_by = dated.first_of_lane(lane)
    placed = first and dated.placed(start_by)
    local arrived = first ~= returned[1] and tonumber(returned[2]) % PRIORITY_SPAN or
      tonumber(redis.call('HGET', key.job(first), 'arrived') or nil) or 0
    oldest = math.min(oldest, arrived)
  end
  if oldest < math.huge then tenants.add_lane(lane, oldest, placed) else tenants.remove_lane(lane, remove) end
end

-- Update the indexes of lanes (model, sig, rank and tenant of each) after entries or returned jobs were added or removed.
function queue.update_lanes(lanes)
  local removed = {}
  local function remove(set, tenant)
    removed[set] = removed[set] or {}
    table.insert(removed[set], tenant)
  end
  for _, lane in ipairs(lanes) do update_lane(lane, remove) end
  for set, members in pairs(removed) do redis.call('ZREM', set, unpack(members)) end
end
