-- NEEDS queue
-- Queued and running jobs by signature.
-- args     signatures...
-- Returns  for each {signature, model, queued jobs and slots by rank (6 numbers), running jobs, oldest age ms | -1,
--          mean ms between completions | -1, age ms of the oldest job above bulk that no quota and no pause holds back | -1,
--          age ms of the oldest bulk job | -1, paused}
local LANES = 8 -- read of each rank, the oldest first; of jobs with a deadline as many, the least slack first
local now, out, limits = clock_ms(), {}, {}
local function number(value) return math.max(0, tonumber(value or 0) or 0) end
local function age(since) return since and math.max(0, math.floor(now - since)) or -1 end
local function earlier(one, other) return one and math.min(one, other or one) or other end

-- Whether a tenant's limit of running slots lets all its queued jobs start. Otherwise a job can be old because of the limit.
local function is_free(tenant)
  if pauses.has_tenant(tenant) then return false end
  quota.learn(limits, {tenant})
  local own = limits[tenant]
  return not own or own.used + (tonumber(redis.call('HGET', key.queued_jobs, tenant) or nil) or 0) <= own.most
end

-- The arrivals of the oldest job of a rank, and of the oldest that no quota holds back.
local function oldest_of(sig, rank)
  local rows, names, arrivals = redis.call('ZRANGE', key.lanes(sig, rank), 0, LANES - 1, 'WITHSCORES'), {}, {}
  for at = 1, #rows, 2 do
    table.insert(names, rows[at])
    table.insert(arrivals, tonumber(rows[at + 1]))
  end
  for _, name in ipairs({key.front(sig), key.solo(sig)}) do
    local id = queue.first(name, rank)
    local job = id and redis.call('HMGET', key.job(id), 'tenant', 'arrived')
    if job and job[1] and tonumber(job[2] or nil) then
      table.insert(names, job[1])
      table.insert(arrivals, tonumber(job[2]))
    end
  end
  for at, id in ipairs(dated.first(sig, rank, LANES)) do
    local job = at % 2 == 1 and redis.call('HMGET', key.job(id), 'tenant', 'arrived')
    if job and job[1] and tonumber(job[2] or nil) then
      table.insert(names, job[1])
      table.insert(arrivals, tonumber(job[2]))
    end
  end
  local oldest, free = nil, nil
  for _, arrived in ipairs(arrivals) do oldest = earlier(arrived, oldest) end
  if rank == 2 then return oldest end
  quota.learn(limits, names)
  for at, name in ipairs(names) do
    if arrivals[at] < (free or math.huge) and is_free(name) then free = arrivals[at] end
  end
  return oldest, free
end

for _, sig in ipairs(args.signatures) do
  local s = redis.call('HMGET', key.signature(sig), 'model', 'jobs:0', 'slots:0', 'jobs:1', 'slots:1', 'jobs:2', 'slots:2',
    'running')
  local oldest, free, bulk, paused = nil, nil, nil, pauses.has_model(s[1] or '')
  for rank = 0, 2 do
    if number(s[2 + 2 * rank]) > 0 then
      local since, startable = oldest_of(sig, rank)
      oldest = earlier(since, oldest)
      if rank == 2 then bulk = since elseif not paused then free = earlier(startable, free) end
    end
  end
  local gap = redis.call('HGET', key.arrivals(sig), 'done_gap')
  table.insert(out, {sig, s[1] or '', number(s[2]), number(s[3]), number(s[4]), number(s[5]), number(s[6]), number(s[7]),
    number(s[8]), age(oldest), gap and math.ceil(tonumber(gap)) or -1, age(free), age(bulk),
    paused and 1 or 0})
end
return out
