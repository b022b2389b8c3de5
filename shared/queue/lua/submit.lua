-- NEEDS line ending
-- Put jobs in line, each of them whole or not at all; sending the same job again changes nothing.
-- KEYS[1]  prefix
-- ARGV[1]  number of jobs, then for each 16 values:
--          id, tenant, rank, seats, signature, model, window ms, largest batch, wire form, created ms,
--          deadline ms | '', batch id | '', input ids parted by spaces | '', idempotency digest and fingerprint 'digest fingerprint' | '',
--          webhook '|state|state| url' | '', 1 for a video | ''
-- Returns  for each {'ok' | 'replayed' | 'mismatch' | 'full' | 'tenant_full', job id | ms until it may fit}
local STRIDE = 16
local OPTIONAL = {'deadline', 'batch', 'input', 'hook', 'video'}
local now = clock_ms()
local total = tonumber(redis.call('HGET', key.waiting, '*') or 0) or 0
local of_tenant, most_of, added, arrivals, indexed, out = {}, {}, {}, {}, {}, {}

local function waiting_of(tenant)
  if not of_tenant[tenant] then of_tenant[tenant] = tonumber(redis.call('HGET', key.waiting, tenant) or 0) or 0 end
  return of_tenant[tenant]
end

local function limit_of(tenant)
  if not most_of[tenant] then
    most_of[tenant] = tonumber(redis.call('HGET', key.limits, tenant .. '|waiting') or nil) or conf.max_waiting_of_tenant
  end
  return most_of[tenant]
end

-- Time until a hundredth of a full queue has been served, at the pace of late.
local function retry_ms(limit)
  local gap = tonumber(redis.call('HGET', key.pace, 'done_gap') or nil)
  if not gap then return 5000 end
  return math.ceil(math.min(60000, math.max(1000, gap * limit / 100)))
end

-- Milliseconds, and thousandths that tell jobs of one script apart: a score in front:<sig> has room for no more.
local function arrived_at(entry)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  return string.format('%s.%03d', ms, math.min(999, 2 * tonumber(number)))
end

local function note(index, job)
  indexed[index] = indexed[index] or {}
  table.insert(indexed[index], job.created)
  table.insert(indexed[index], job.id)
end

local function enter(job)
  local lane = key.lane(job.sig, job.rank, job.tenant)
  local group = added[lane]
  if not group then
    group = {sig = job.sig, rank = job.rank, tenant = job.tenant, jobs = 0, seats = 0}
    added[lane] = group
    table.insert(added, group)
    if redis.call('EXISTS', lane) == 0 then redis.call('XGROUP', 'CREATE', lane, 'workers', '0', 'MKSTREAM') end
  end
  local entry = redis.call('XADD', lane, '*', 'job', job.id, 'seats', job.seats)
  group.first = group.first or entry
  group.jobs = group.jobs + 1
  group.seats = group.seats + job.seats
  local fields = {'job', job.wire, 'state', 'queued', 'tenant', job.tenant, 'sig', job.sig, 'model', job.model,
    'rank', job.rank, 'seats', job.seats, 'src', 'lane', 'entry', entry, 'arrived', arrived_at(entry), 'event', ending.event(job.id, job.tenant, 'queued', job.hook)}
  for _, name in ipairs(OPTIONAL) do
    if job[name] ~= '' then
      table.insert(fields, name)
      table.insert(fields, job[name])
    end
  end
  redis.call('HSET', job.key, unpack(fields))
  note(key.jobs(job.tenant), job)
  if job.video ~= '' then note(key.videos(job.tenant), job) end
  if job.batch ~= '' then note(key.batch(job.tenant, job.batch), job) end
  if job.deadline ~= '' then redis.call('ZADD', key.deadlines, job.deadline, job.id) end
  if job.input ~= '' then ending.hold_inputs(job.tenant, job.input) end
  if not arrivals[job.sig] then
    arrivals[job.sig] = job
    table.insert(arrivals, job)
  end
  total, of_tenant[job.tenant] = total + 1, of_tenant[job.tenant] + 1
end

local function submit(job)
  job.key = key.job(job.id)
  if redis.call('EXISTS', job.key) == 1 then return {'ok', job.id} end
  local idem, fingerprint = nil, nil
  if job.once ~= '' then
    local digest
    digest, fingerprint = string.match(job.once, '^(%S+) (.*)$')
    idem = key.idem(job.tenant, digest)
    local known = redis.call('GET', idem)
    if known then
      local known_id, known_print = string.match(known, '^(%S+) (.*)$')
      if known_id and redis.call('EXISTS', key.job(known_id)) == 1 then
        if known_print ~= fingerprint then return {'mismatch', known_id} end
        return {'replayed', known_id}
      end
    end
  end
  if waiting_of(job.tenant) >= limit_of(job.tenant) then return {'tenant_full', retry_ms(limit_of(job.tenant))} end
  if total >= conf.max_waiting then return {'full', retry_ms(conf.max_waiting)} end
  enter(job)
  if idem then redis.call('SET', idem, job.id .. ' ' .. fingerprint, 'PX', conf.idempotency_ms) end
  return {'ok', job.id}
end

for item = 1, tonumber(ARGV[1]) do
  local at = 2 + (item - 1) * STRIDE
  out[item] = submit({id = ARGV[at], tenant = ARGV[at + 1], rank = tonumber(ARGV[at + 2]),
    seats = tonumber(ARGV[at + 3]), sig = ARGV[at + 4], model = ARGV[at + 5], window = ARGV[at + 6],
    max_batch = ARGV[at + 7], wire = ARGV[at + 8], created = ARGV[at + 9], deadline = ARGV[at + 10],
    batch = ARGV[at + 11], input = ARGV[at + 12], once = ARGV[at + 13], hook = ARGV[at + 14],
    video = ARGV[at + 15]})
end
for index, rows in pairs(indexed) do line.add_all(index, rows) end
for _, job in ipairs(arrivals) do
  redis.call('HSET', key.sig(job.sig), 'model', job.model, 'window', job.window, 'batch', job.max_batch)
  line.arrive(job.sig, tonumber(job.window), now)
end
local urgent = 2
for _, group in ipairs(added) do
  urgent = math.min(urgent, group.rank)
  line.count(group.sig, group.rank, group.tenant, group.jobs, group.seats)
  redis.call('ZADD', key.lanes(group.sig, group.rank), 'NX', whole(stream_ms(group.first)), group.tenant)
  -- Rows of jobs whose record is gone leave the index even where no sweep runs.
  for _, old in ipairs(redis.call('ZRANGE', key.jobs(group.tenant), 0, 3)) do
    if redis.call('EXISTS', key.job(old)) == 0 then redis.call('ZREM', key.jobs(group.tenant), old) end
  end
end
local sooner = false
for _, job in ipairs(arrivals) do
  local held = redis.call('SISMEMBER', key.held(job.tenant), job.sig) == 1
  sooner = line.refresh(job.sig, now, true, held) or sooner
end
if sooner then line.wake(urgent) end
return out
