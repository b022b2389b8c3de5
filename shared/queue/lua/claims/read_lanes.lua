-- NEEDS dead_letters claim_job dated latest_start queue tenants
-- RUNS when Redis is full
-- Read what decides which jobs of a signature a worker claims. Entries and rows without a queued job are removed.
-- args     worker, signature, slots, lowest_rank, page, tenant
--          `page`: of the tenants of each priority, from 0; `tenant`: one that is read in any case, '' for none
-- Returns  JSON: {} if the signature has no jobs, or {now, model, batch, efficient, queued, claimed, mean, lost, lanes, more},
--          as `shared/queue/order/facts.py` reads them
local TENANTS = 64
local SPARE = 1 -- jobs of a lane beyond its share of the slots
local MORE_TENANTS = 2 -- than slots
local LOST = 64
local STREAM_READS = 16
local RETURNED = 32
local LOSES_PLACE = 7 -- column of a job's row
local FACTS = {'state', 'tenant', 'slots', 'src', 'entry', 'epoch', 'arrived', 'returned', 'passed', 'overtaken', 'deadline',
  'start_by', 'on_deadline', 'steps', 'waiting_worker', 'waited'}
local worker, sig, slots, lowest, page = args.worker, args.signature, args.slots, args.lowest_rank, args.page
local wanted = args.tenant
local now = clock_ms()
local state = redis.call('HMGET', key.signature(sig), 'model', 'batch', 'jobs:0', 'slots:0', 'jobs:1', 'slots:1', 'jobs:2',
  'slots:2', 'overtaken:0', 'overtaken:1', 'overtaken:2')
local model = state[1]
if not model then return '{}' end
local limits = {}
-- The first page has about as many tenants as can start jobs; behind it are others only if none of them can.
local first_page = math.min(TENANTS, slots + MORE_TENANTS)

-- The fields of a job that decide whether it is claimed; nil if it is gone.
local function load(id)
  local values = redis.call('HMGET', key.job(id), unpack(FACTS))
  if not values[1] then return nil end
  local job = {sig = sig}
  for at, name in ipairs(FACTS) do job[name] = values[at] or nil end
  job.slots = tonumber(job.slots)
  return job
end

-- The row of a queued job, as `QueuedJob`.
local function row_of(id, job, since)
  return {id, tonumber(job.epoch) or 0, job.src, job.slots, since, tonumber(job.start_by or nil) or cjson.null,
    claim_job.loses_place(job, now) ~= nil, tonumber(job.passed or nil) or cjson.null,
    tonumber(job.overtaken or nil) or 0, job.tenant,
    job.waiting_worker ~= worker and tonumber(job.waited or nil) or cjson.null}
end

-- The first jobs of a tenant that go before its lane's stream, with those before them that lose their place, and whether there
-- are more.
local function returned_jobs(rank, tenant, count)
  local out, kept, first = {}, 0, 0
  repeat
    local ids = redis.call('ZRANGE', key.returned(sig, rank, tenant), first, first + count - 1)
    for _, id in ipairs(ids) do
      local job = load(id)
      if job and job.state == 'queued' then
        local row = row_of(id, job, tonumber(job.arrived) or now)
        table.insert(out, row)
        if not row[LOSES_PLACE] then kept = kept + 1 end
        first = first + 1
      else
        queue.remove_returned(id, {sig = sig, rank = rank, tenant = tenant})
      end
    end
    if #ids < count then return out, false end
  until kept >= count or first >= RETURNED
  return out, true
end

-- Remove an entry without a job, which becomes a dead letter.
local function bury(rank, tenant, lane, entry, id)
  queue.remove_entry(lane, entry[1])
  queue.count(sig, rank, tenant, -1, -(tonumber(queue.value_of(entry, 'slots')) or 1))
  id = id or table.concat({sig, RANKS[rank], tenant, entry[1]}, '|')
  dead_letters.bury(id, 'no_record', 'entry without a job: ' .. sig, now)
end

local function add_job(out, rank, tenant, lane, entry)
  local id = queue.value_of(entry, 'job')
  local job = id and load(id)
  if not job then
    bury(rank, tenant, lane, entry, id)
  elseif job.entry ~= entry[1] then
    queue.remove_entry(lane, entry[1])
  elseif job.state == 'queued' then
    table.insert(out, row_of(id, job, stream_ms(entry[1])))
  end
end

-- The first queued jobs of a lane's stream.
local function stream_jobs(rank, tenant, count)
  local lane, out, from = key.lane(sig, rank, tenant), {}, '-'
  for _ = 1, STREAM_READS do
    local entries = redis.call('XRANGE', lane, from, '+', 'COUNT', count)
    for _, entry in ipairs(entries) do add_job(out, rank, tenant, lane, entry) end
    if out[1] or #entries < count then break end
    from = '(' .. entries[#entries][1]
  end
  return out
end

-- The tenants on a page of those with the least usage, and the wanted one; whether there are more.
local function tenants_of(rank)
  local first = page == 0 and 0 or first_page + (page - 1) * TENANTS
  local last = page == 0 and first_page or first + TENANTS
  local order = key.lane_order(sig, rank)
  local rows, out, has_wanted = tenants.first(order, last), {}, wanted == ''
  for at = first + 1, #rows do
    table.insert(out, rows[at])
    has_wanted = has_wanted or rows[at].tenant == wanted
  end
  if not has_wanted and redis.call('ZSCORE', order, wanted) then
    table.insert(out, {tenant = wanted, usage = tenants.usage_of(wanted) or 0})
  end
  return out, #rows == last
end

-- The lanes of a priority with their first jobs; whether there are more tenants.
local function lanes_of(rank)
  local rows, more = tenants_of(rank)
  local out, names, each = {}, {}, SPARE + math.ceil(slots / math.max(1, #rows))
  for at, row in ipairs(rows) do names[at] = row.tenant end
  quota.learn(limits, names)
  for _, row in ipairs(rows) do
    local tenant = row.tenant
    local placed = tonumber(redis.call('ZSCORE', key.tenant_signatures(tenant, model, rank), sig) or nil)
    local returned, more_returned, stream = {}, false, {}
    if quota.allows(limits, tenant, 1) then
      returned, more_returned = returned_jobs(rank, tenant, each)
      stream = stream_jobs(rank, tenant, each)
    end
    table.insert(out, {rank, tenant, row.usage, quota.row(limits, tenant),
      placed and dated.start_by_of(placed, {sig = sig, rank = rank, tenant = tenant}, now) or cjson.null,
      returned, more_returned, stream})
  end
  return out, more
end

-- The first lost jobs of a priority, and whether there are more.
local function lost_of(rank)
  local out, names, jobs, ids = {}, {}, {}, queue.of_rank(key.solo(sig), rank, page * LOST, LOST)
  for _, id in ipairs(ids) do
    local job = load(id)
    if job and job.state == 'queued' then
      table.insert(jobs, {id, job})
      table.insert(names, job.tenant)
    else
      redis.call('ZREM', key.solo(sig), id)
    end
  end
  quota.learn(limits, names)
  for _, row in ipairs(jobs) do
    table.insert(out, {rank, row[2].tenant, tenants.usage_of(row[2].tenant) or 0, quota.row(limits, row[2].tenant),
      row_of(row[1], row[2], tonumber(row[2].returned) or now)})
  end
  return out, #ids == LOST
end

local facts = {now = now, model = model, batch = tonumber(state[2] or nil) or 0, queued = {}, lost = {}, lanes = {},
  more = false, efficient = tonumber(redis.call('GET', key.efficient_rows(sig)) or nil) or 0,
  claimed = tonumber(redis.call('HGET', key.claimed_jobs, worker) or nil) or 0, mean = latest_start.run_ms(sig, now)}
for rank = 0, 2 do
  local jobs = tonumber(state[2 * rank + 3] or nil) or 0
  facts.queued[rank + 1] = {math.max(0, jobs), math.max(0, tonumber(state[2 * rank + 4] or nil) or 0),
    tonumber(redis.call('ZSCORE', key.ready(model, rank), sig) or nil) or cjson.null, tonumber(state[9 + rank] or nil) or 0}
  if rank <= lowest then
    local lost, more_lost = lost_of(rank)
    for _, row in ipairs(lost) do table.insert(facts.lost, row) end
    facts.more = facts.more or more_lost
    if jobs > 0 then
      local lanes, more = lanes_of(rank)
      for _, lane in ipairs(lanes) do table.insert(facts.lanes, lane) end
      facts.more = facts.more or more
    end
  end
end
return cjson.encode(facts)
