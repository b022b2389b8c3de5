-- NEEDS claim_job choice
-- Part of claim and join: the tenants of a signature take turns, the least-served one first. In its turn a tenant's released
-- and skipped jobs go before those with a deadline, and these before the entries of its lane.

local lane_turns = {}
local TENANTS_READ, PAGES = 64, 4
local RETURNED_READ = 16
local SKIPS = 4
local READS = 600

-- Read the next entries of a lane through its group.
local function read_entries(lane, count)
  local reply = redis.pcall('XREADGROUP', 'GROUP', 'workers', 'workers', 'COUNT', count, 'STREAMS', lane, '>')
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'NOGROUP', 1, true) then return {} end
    -- The group was lost. Read from 0, to find queued jobs again; entries of running jobs are known by the job's hash.
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

-- Move an entry without a job to the dead letters.
local function bury_entry(batch, rank, lane, tenant, entry)
  queue.acknowledge(lane, entry.id)
  queue.count(batch.sig, rank, tenant, -1, -(tonumber(entry.slots) or 1))
  job_state.bury(entry.job or (batch.sig .. '|' .. RANKS[rank] .. '|' .. tenant .. '|' .. entry.id), 'no_record',
    'entry without a job: ' .. batch.sig, batch.now)
end

-- Claim the job of an entry, or move it to the front of its lane if it does not fit.
local function claim_entry(batch, rank, turn, entry)
  local job = entry.job and job_state.load(entry.job) or nil
  if not job then
    bury_entry(batch, rank, turn.lane, turn.tenant, entry)
  elseif job.entry ~= entry.id then
    queue.acknowledge(turn.lane, entry.id)
  elseif job.state == 'queued' and not claim_job.removed(batch, entry.job, job) then
    if claim_job.fits(batch, job.slots) then return claim_job.take(batch, entry.job, job) end
    queue.acknowledge(turn.lane, entry.id)
    redis.call('HSET', key.job(entry.job), 'src', 'front', 'entry', '')
    job.src = 'front'
    queue.add_returned(entry.job, job, tonumber(job.arrived) or batch.now)
    queue.note_moves(batch.sig, rank, job.tenant, 1)
    claim_job.skip(batch, entry.job)
    turn.skips = turn.skips + 1
  end
end

-- The slots that the next entry of a lane needs; nil without one or when the lane's group was lost.
local function next_slots(turn)
  local head = turn.last and '(' .. turn.last or queue.head(turn.lane)
  local row = head and redis.call('XRANGE', turn.lane, head, '+', 'COUNT', 1)[1]
  for place = 1, row and #row[2] or 0, 2 do
    if row[2][place] == 'slots' then return tonumber(row[2][place + 1]) end
  end
end

-- Read the next entries of a turn's lane, and claim their jobs. Returns false if its quota ends the turn, nil without entries.
local function from_stream(batch, turn, count)
  if turn.has_returned and not turn.last and redis.call('EXISTS', turn.lane) == 0 then
    turn.drained = true
    return nil
  end
  if quota.bound(batch, turn.tenant) then
    -- Check before reading: an entry that was read has left the queue.
    local slots = next_slots(turn)
    if slots and not quota.allows(batch, turn.tenant, slots) then return false end
    count = 1
  end
  local entries = read_entries(turn.lane, count)
  if not entries[1] then
    turn.drained = true
    return nil
  end
  for _, entry in ipairs(entries) do claim_entry(batch, turn.rank, turn, entry) end
  turn.last = entries[#entries].id
  turn.reads = turn.reads + #entries
  return true
end

-- Whether the next job of the stream has its turn before one with a deadline; otherwise it is overtaken once more.
local function stream_has_turn(batch, turn)
  if turn.drained then return false end
  local after = turn.last and '(' .. turn.last or queue.head(turn.lane)
  local row = after and redis.call('XRANGE', turn.lane, after, '+', 'COUNT', 1)[1]
  if not row or not dated.is_aged(stream_ms(row[1]), batch.now) then return false end
  for place = 1, #row[2], 2 do
    if row[2][place] == 'job' then
      local name = key.job(row[2][place + 1])
      local known = redis.call('HMGET', name, 'state', 'overtaken')
      if known[1] ~= 'queued' or dated.turn({since = stream_ms(row[1]), overtaken = tonumber(known[2] or nil)}, batch.now) == 0 then
        return true
      end
      redis.call('HINCRBY', name, 'overtaken', 1)
    end
  end
  return false
end

-- Read the first jobs of a turn that go before its lane's stream.
local function read_returned(batch, turn)
  turn.removed = false
  turn.returned = redis.call('ZRANGE', key.returned(batch.sig, turn.rank, turn.tenant), 0,
    math.max(RETURNED_READ, batch.left + SKIPS) - 1)
end

-- Claim released, skipped and dated jobs of a tenant until `enough` are claimed. Returns false if its quota ends the turn.
local function from_returned(batch, turn, enough)
  while #batch.claims < enough and batch.left > 0 and not batch.held do
    if not turn.returned[1] and turn.removed then read_returned(batch, turn) end
    local id = turn.returned[1]
    if not id then break end
    local job = job_state.load(id)
    if not job or job.state ~= 'queued' then
      queue.remove_returned(id, {sig = batch.sig, rank = turn.rank, tenant = turn.tenant})
      turn.touched = true
    elseif job.src ~= 'solo' and claim_job.loses_place(batch, job) then
      if claim_job.has_removed_most(batch) then break end
      claim_job.remove(batch, id, job)
      turn.touched, turn.removed = true, true
    elseif job.src == 'dated' and turn.yielded ~= id and stream_has_turn(batch, turn) then
      turn.yielded = id
      if from_stream(batch, turn, 1) == false then return false end
      table.insert(turn.returned, 1, id)
    elseif job.src ~= 'solo' then
      if not quota.allows(batch, job.tenant, job.slots) then return false end
      if claim_job.fits(batch, job.slots) then
        queue.remove_returned(id, job)
        claim_job.take(batch, id, job)
        turn.touched = true
      else
        claim_job.skip(batch, id)
        batch.held = claim_job.reserves_slots(id, batch.worker, batch.now)
      end
    end
    table.remove(turn.returned, 1)
  end
  return true
end

-- Claim up to `count` jobs of a tenant. Returns whether there can be more.
local function take_turn(batch, turn, count)
  local enough = #batch.claims + count
  if not from_returned(batch, turn, enough) then return false end
  while #batch.claims < enough and batch.left > 0 and not batch.held do
    if not from_stream(batch, turn, enough - #batch.claims) then return false end
    if turn.skips >= SKIPS or turn.reads >= READS or claim_job.has_removed_most(batch) then return false end
  end
  return batch.left > 0
end

-- The next tenants of a part in the order of service, without those that had a turn (s.had, by rank) and those without free
-- slots. Returns the turns, and whether there can be more.
local function next_turns(batch, request, s, part)
  local had = s.had[part.rank]
  local count = had.read + math.max(math.min(TENANTS_READ, math.max(8, batch.left)), had.refused and had.read or 0)
  local rows = tenants.first(key.lane_order(batch.sig, part.rank), count)
  local names, turns = {}, {}
  for at, row in ipairs(rows) do names[at] = row.tenant end
  quota.learn(batch, names)
  for _, row in ipairs(rows) do
    local tenant = row.tenant
    if not had[tenant] and choice.includes(request, part, row.usage) then
      had[tenant] = true
      if quota.allows(batch, tenant, 1) then
        local turn = {tenant = tenant, usage = row.usage, rank = part.rank, lane = key.lane(batch.sig, part.rank, tenant),
          skips = 0, reads = 0, has_returned = s.has_returned[part.rank]}
        turn.returned = {}
        if turn.has_returned then read_returned(batch, turn) end
        table.insert(turns, turn)
      end
    end
  end
  had.read, had.refused = #rows, not turns[1]
  -- Tenants that are ahead are the first ones.
  local all_read = #rows < count or (part.ahead and not choice.includes(request, part, rows[#rows].usage))
  return turns, not all_read and count < tenants.SEARCHED
end

-- The next turns of all parts, by usage. A tenant with jobs in two parts has its turn of the second one later.
local function turns_of(batch, request, s, parts)
  local turns, firsts, more = {}, {}, false
  for at, part in ipairs(parts) do
    local found, follow = next_turns(batch, request, s, part)
    more = more or follow
    for _, turn in ipairs(found) do
      if at > 1 and firsts[turn.tenant] then
        s.had[part.rank][turn.tenant], more = nil, true
      else
        firsts[turn.tenant] = true
        table.insert(turns, turn)
        turn.at = #turns
      end
    end
  end
  table.sort(turns, function(one, other)
    if one.usage ~= other.usage then return one.usage < other.usage end
    return one.at < other.at
  end)
  return turns, more
end

-- Update the indexes of the lane of a turn.
local function leave(batch, turn)
  if not (turn.last or turn.drained or turn.touched) then return end
  local head = nil
  if turn.last then
    local entry = redis.call('XRANGE', turn.lane, '(' .. turn.last, '+', 'COUNT', 1)[1]
    head = entry and entry[1]
  elseif not turn.drained then
    head = queue.head(turn.lane)
  end
  queue.update_lane({model = batch.model, sig = batch.sig, rank = turn.rank, tenant = turn.tenant,
    known = not turn.has_returned and turn.skips == 0}, head)
end

-- Whether every job of the parts needs one slot: then as many entries as slots can be read at once, otherwise one by one.
local function has_single_slots(batch, parts)
  for _, part in ipairs(parts) do
    if batch.queued[part.rank].jobs ~= batch.queued[part.rank].slots then return false end
  end
  return true
end

-- Share the slots among the tenants with queued jobs of the parts of a step.
function lane_turns.share(batch, request, parts)
  local s, queued, has_dated = {had = {}, has_returned = {}}, {}, redis.call('EXISTS', key.dated(batch.sig)) == 1
  for _, part in ipairs(parts) do
    if batch.queued[part.rank].jobs > 0 then
      table.insert(queued, part)
      s.had[part.rank] = {read = 0}
      s.has_returned[part.rank] = has_dated or queue.first(key.front(batch.sig), part.rank) ~= nil
    end
  end
  local single = has_single_slots(batch, queued)
  local pages = 0
  while pages < PAGES do
    if batch.left <= 0 or batch.held or not queued[1] then return end
    local turns, more = turns_of(batch, request, s, queued)
    if turns[1] then pages = pages + 1 end
    local active = turns
    while batch.left > 0 and not batch.held and active[1] do
      local again = {}
      local share = single and math.max(1, math.floor(batch.left / #active)) or 1
      for _, turn in ipairs(active) do
        if batch.left <= 0 or batch.held then break end
        if take_turn(batch, turn, math.min(share, batch.left)) then table.insert(again, turn) end
      end
      active = again
    end
    for _, turn in ipairs(turns) do leave(batch, turn) end
    if not more then return end
  end
end
