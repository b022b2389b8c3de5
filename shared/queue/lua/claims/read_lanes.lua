-- NEEDS dead_letters claim_job dated latest_start queue tenants
-- RUNS when Redis is full
-- Read what decides which jobs of a signature a worker claims. Entries and rows without a queued job are removed.
-- args     worker, signature, slots, lowest_rank, page, tenant
--          `page`: of the tenants of each priority, from 0; `tenant`: one that is read in any case, '' for none
-- Returns  JSON: {} if the signature has no jobs, or {now, state, ready, efficient, claimed, mean, lost, lanes, more},
--          as `shared/queue/order/facts.py` reads them
local TENANTS = 64
local SPARE = 1 -- jobs of a lane beyond its share of the slots
local MORE_TENANTS = 2 -- than slots, on the first page: behind it are others only if none of these can start jobs
local LOST = 64
local STREAM_READS = 16
local RETURNED = 32
-- Of the row of a job, before its id and whether it loses its place; in the order of `JOB_FIELDS` in facts.py.
local FACTS = {'state', 'tenant', 'entry', 'deadline', 'src', 'epoch', 'slots', 'arrived', 'returned', 'start_by', 'passed',
  'overtaken', 'waiting_worker', 'waited', 'on_deadline', 'steps', 'left'}
local STATE, TENANT, ENTRY, DEADLINE, LOSES_PLACE = 1, 2, 3, 4, #FACTS + 2
local worker, sig, slots, lowest, page = args.worker, args.signature, args.slots, args.lowest_rank, args.page
local wanted, now = args.tenant, clock_ms()
local state = redis.call('HMGET', key.signature(sig), 'model', 'batch', 'jobs:0', 'jobs:1', 'jobs:2', 'slots:0', 'slots:1',
  'slots:2', 'overtaken:0', 'overtaken:1', 'overtaken:2')
local model = state[1]
if not model then return '{}' end
local limits, has_returned = {}, queue.has_returned(sig)
local facts = {now = now, state = state, ready = {}, lost = {}, lanes = {}, more = false, mean = latest_start.run_ms(sig, now),
  efficient = redis.call('GET', key.efficient_rows(sig)), claimed = redis.call('HGET', key.claimed_jobs, worker)}
local startable = 0 -- jobs that were read of tenants with free slots

-- The row of a job; nil if it is gone.
local function row_of(id)
  local row, job = redis.call('HMGET', key.job(id), unpack(FACTS)), {sig = sig}
  if not row[STATE] then return nil end
  if row[DEADLINE] then for at, name in ipairs(FACTS) do job[name] = row[at] or nil end end
  table.insert(row, id)
  table.insert(row, claim_job.loses_place(job, now) ~= nil)
  return row
end

local function is_queued(row) return row and row[STATE] == 'queued' end

-- The first jobs of a tenant that go before its lane's stream, with those before them that lose their place, and whether there
-- are more.
local function returned_jobs(rank, tenant, count)
  local out, kept, first = {}, 0, 0
  repeat
    local ids = redis.call('ZRANGE', key.returned(sig, rank, tenant), first, first + count - 1)
    for _, id in ipairs(ids) do
      local row = row_of(id)
      if is_queued(row) then
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
  local row = id and row_of(id)
  if not row then
    bury(rank, tenant, lane, entry, id)
  elseif row[ENTRY] ~= entry[1] then
    queue.remove_entry(lane, entry[1])
  elseif is_queued(row) then
    table.insert(out, row)
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

-- The tenants on a page of those with the least usage, and the wanted one; whether there are more. `most`: jobs that can start.
local function tenants_of(rank, most)
  local first = page == 0 and 0 or MORE_TENANTS + (page - 1) * TENANTS
  local last = page == 0 and math.min(TENANTS, most + MORE_TENANTS) or first + TENANTS
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

-- Add the lanes of a priority with their first jobs to the facts.
local function add_lanes(rank, most)
  local rows, more = tenants_of(rank, most)
  local names, each = {}, SPARE + math.ceil(slots / math.max(1, #rows))
  for at, row in ipairs(rows) do names[at] = row.tenant end
  quota.learn(limits, names)
  for _, row in ipairs(rows) do
    local tenant = row.tenant
    local placed, returned, more_returned, stream = nil, {}, false, {}
    if has_returned then placed = tonumber(redis.call('ZSCORE', key.tenant_signatures(tenant, model, rank), sig) or nil) end
    if quota.allows(limits, tenant, 1) then
      if has_returned then returned, more_returned = returned_jobs(rank, tenant, each) end
      stream = stream_jobs(rank, tenant, each)
      for count = 1, #returned + #stream do if quota.allows(limits, tenant, count) then startable = startable + 1 end end
    end
    table.insert(facts.lanes, {rank, tenant, row.usage, quota.row(limits, tenant),
      placed and dated.start_by_of(placed, {sig = sig, rank = rank, tenant = tenant}, now) or cjson.null,
      returned, more_returned, stream})
  end
  facts.more = facts.more or more
end

-- Add the first lost jobs of a priority to the facts.
local function add_lost(rank)
  local names, rows, ids = {}, {}, queue.of_rank(key.solo(sig), rank, page * LOST, LOST)
  for _, id in ipairs(ids) do
    local row = row_of(id)
    if is_queued(row) then
      table.insert(rows, row)
      table.insert(names, row[TENANT])
    else
      redis.call('ZREM', key.solo(sig), id)
    end
  end
  quota.learn(limits, names)
  for at, tenant in ipairs(names) do
    table.insert(facts.lost, {rank, tenant, tenants.usage_of(tenant) or 0, quota.row(limits, tenant), rows[at]})
  end
  facts.more = facts.more or #ids == LOST
end

for rank = 0, 2 do
  facts.ready[rank + 1] = redis.call('ZSCORE', key.ready(model, rank), sig)
  if rank <= lowest then
    add_lost(rank)
    -- Bulk jobs that are not due start in the slots that others leave.
    local is_due = rank < 2 or (tonumber(redis.call('HGET', key.bulk_credit, model) or nil) or 0) >= 1
    if (tonumber(state[rank + 3] or nil) or 0) > 0 then add_lanes(rank, is_due and slots or math.max(0, slots - startable)) end
  end
end
return cjson.encode(facts)
