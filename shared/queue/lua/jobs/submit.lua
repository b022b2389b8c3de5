-- NEEDS children events inputs later place footprint latest_start spending groups sources
-- Queue jobs, each completely or not at all; idempotent by job id.
-- args     positions, jobs...
--          `positions`: return what decides those of the jobs, and their deadlines. Of each job `input` is its images and
--          adapters, as `inputs.find` takes them; `idempotency`: 'digest fingerprint'; `webhook`: '|state|state| url';
--          `sync_call`: 'digest process' of a request that waits for the job; `after`: its parents, among them its `sources`;
--          `ended_sources`: jobs that had ended, and need not be kept, from copies of whose artifacts it starts
-- Returns  for each {'ok' | 'replayed' | 'mismatch', job id, as `place.of` | nil, its deadline | nil}, {'full' | 'tenant_full',
--          limit of queued jobs, ms between the ends of jobs | ''}, {'quota', its name, when it resets (ms) | ''},
--          {'input', id of one that has been deleted}, or {'parent', place of the one in `after` that it cannot wait for, its
--          state | 'gone' | 'full'}
-- Fields of the job's hash that are left out when empty. `deadline` is now, or when a job for later is due,
-- plus the time limit.
local OPTIONAL = {'deadline', 'batch', 'input', 'webhook', 'video', 'on_deadline', 'steps', 'group', 'parents', 'on_parent',
  'limit', 'sources'}
local now = clock_ms()
local total = (tonumber(redis.call('HGET', key.queued_jobs, '*') or 0) or 0)
total = total + redis.call('ZCARD', key.paused) + redis.call('ZCARD', key.later)
local of_tenant, most_of, spent, kept, kept_more = {}, {}, {}, {}, {}
local added, arrivals, indexed, families, grouped, deadlines, out = {}, {}, {}, {}, {}, {}, {}

local function queued_of(tenant)
  if not of_tenant[tenant] then
    local in_lanes = tonumber(redis.call('HGET', key.queued_jobs, tenant) or 0) or 0
    of_tenant[tenant] = in_lanes + redis.call('SCARD', key.paused_jobs(tenant)) + redis.call('SCARD', key.later_jobs(tenant))
  end
  return of_tenant[tenant]
end

local function limit_of(tenant)
  if not most_of[tenant] then
    local own = tonumber(redis.call('HGET', key.tenant_limits, tenant .. '|queued_jobs') or nil)
    most_of[tenant] = own or conf.max_queued_jobs_per_tenant
  end
  return most_of[tenant]
end

-- The limit of device time that a tenant has used up, and when it resets: {} if none.
local function spent_by(tenant)
  if not spent[tenant] then spent[tenant] = {spending.used_up(tenant, now)} end
  return spent[tenant]
end

-- Whether a tenant has its limit of queued jobs, or its share: it may have as many as there is room left for others (or more,
-- in the proportion of a limit above half of the queue), so that some is always left for another tenant. See "Dynamic queue
-- length thresholds for shared-memory packet switches", Choudhury and Hahne, 1998.
local function has_its_share(tenant)
  local most, queued, room = limit_of(tenant), queued_of(tenant), conf.max_queued_jobs - total
  if queued >= most then return true end
  return most < conf.max_queued_jobs and room > 0 and queued >= room * math.max(1, most / (conf.max_queued_jobs - most))
end

-- Count a new idempotency key of a tenant. Keys outlive their jobs: in their lifetime as many are allowed as jobs are kept, but
-- no fewer than a client that deletes its jobs needs.
local function too_many_keys(tenant)
  local name = key.idempotency_keys(tenant)
  local count = redis.call('INCR', name)
  if count == 1 then redis.call('PEXPIRE', name, conf.idempotency_ms) end
  return count > math.max(conf.idempotency_keys, kept[tenant].most[1])
end

-- The quota that the job exceeds, or nil; otherwise the job is counted.
local function exceeded_quota(job, has_key)
  local tenant = job.tenant
  if not kept[tenant] then kept[tenant], kept_more[tenant] = footprint.read(tenant), {0, 0, 0, 0} end
  local more = footprint.numbers(job.size)
  local quota = footprint.exceeded(kept[tenant], more, true)
  if quota then return quota end
  if has_key and too_many_keys(tenant) then return 'idempotency_keys' end
  footprint.count(kept[tenant], more)
  for at, number in ipairs(more) do kept_more[tenant][at] = kept_more[tenant][at] + number end
end

-- The reply to a job that exceeds a limit of queued jobs.
local function full(code, limit) return {code, limit, redis.call('HGET', key.completions, 'done_gap') or ''} end

-- Milliseconds from the id of a stream entry, with a fraction that orders the jobs of one millisecond by the number in the id.
-- Numbers are 0.002 ms apart: a score in front:<sig> is above 2^43 in bulk, where a double has steps of 2^-9 ms. From
-- the 500th on they are the same.
local function arrived_at(entry)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  return string.format('%s.%03d', ms, math.min(999, 2 * tonumber(number)))
end

local function begins_too_many_groups(job)
  return not grouped[job.tenant .. '|' .. job.group] and groups.is_full(job.tenant, job.group)
end

-- Note a job for the rows of its group.
local function note_group(job)
  local name = job.tenant .. '|' .. job.group
  if not grouped[name] then
    grouped[name] = {tenant = job.tenant, group = job.group, rows = {}}
    groups.begin(job.tenant, job.group, now)
  end
  table.insert(grouped[name].rows, job.created)
  table.insert(grouped[name].rows, job.id)
end

local function note(index, job)
  indexed[index] = indexed[index] or {}
  table.insert(indexed[index], job.created)
  table.insert(indexed[index], job.id)
end

local function note_child(job, parent)
  local name = key.child_jobs(job.tenant, parent)
  families[name] = true
  note(name, job)
end

-- Note a job among the children of its parents, which can have ended.
local function note_family(job)
  for parent in string.gmatch(job.after, '%S+') do note_child(job, parent) end
  for parent in string.gmatch(job.ended_sources, '%S+') do
    if redis.call('HGET', key.job(parent), 'tenant') == job.tenant then note_child(job, parent) end
  end
end

-- Append the entry of a job to the stream of its lane; returns the entry and the job's arrival.
local function append(job, lane, group)
  group.number = (group.number or queue.last_number(lane)) + 1
  local entry = redis.call('XADD', lane, '*', 'job', job.id, 'slots', job.slots, 'number', group.number)
  group.first = group.first or entry
  return entry, arrived_at(entry)
end

-- Queue a job with a deadline by its latest start, or one that is late at once like the others; returns as `append`.
local function add_dated(job, lane, group)
  job.deadline = whole(now + job.time_limit_ms)
  deadlines[job.id] = job.deadline
  latest_start.set(job.id, job, now)
  if not job.start_by then return append(job, lane, group) end
  job.src, group.dated = 'dated', (group.dated or 0) + 1
  local arrived = arrived_at(whole(now) .. '-' .. group.dated)
  queue.add_returned(job.id, job, arrived)
  return '', arrived
end

-- Queue a job in its lane; returns as `append`.
local function join_lane(job)
  local lane = key.lane(job.sig, job.rank, job.tenant)
  local group = added[lane]
  if not group then
    group = {model = job.model, sig = job.sig, rank = job.rank, tenant = job.tenant, jobs = 0, slots = 0}
    added[lane] = group
    table.insert(added, group)
  end
  job.src = 'lane'
  local entry, arrived
  if not job.time_limit_ms then
    job.steps = nil
    entry, arrived = append(job, lane, group)
  else
    entry, arrived = add_dated(job, lane, group)
  end
  group.jobs = group.jobs + 1
  group.slots = group.slots + job.slots
  if not arrivals[job.sig] then
    arrivals[job.sig] = job
    table.insert(arrivals, job)
  end
  return entry, arrived
end

-- Let a job wait until it is due, from when its time limit counts; returns as `append`.
local function wait(job)
  job.wait_until = whole(math.max(now, job.not_before or 0))
  if job.parents then
    job.limit = job.time_limit_ms
    children.link(job.id, job.parents, now)
  elseif job.time_limit_ms then
    job.deadline = whole(job.not_before + job.time_limit_ms)
    deadlines[job.id] = job.deadline
  end
  if not job.time_limit_ms then job.steps = nil end
  later.add(job.id, job)
  redis.call('HSET', job.key, 'window', job.window, 'max_batch', job.max_batch)
  return '', job.wait_until
end

local function enter(job)
  local waits = job.parents or job.not_before and job.not_before > now
  local entry, arrived = (waits and wait or join_lane)(job)
  local fields = {'job', job.wire, 'state', 'queued', 'tenant', job.tenant, 'sig', job.sig, 'model', job.model,
    'rank', job.rank, 'slots', job.slots, 'size', job.size, 'src', job.src, 'entry', entry, 'arrived', arrived,
    'event', events.publish(job.id, job.tenant, 'queued', job.webhook)}
  for _, name in ipairs(OPTIONAL) do
    if (job[name] or '') ~= '' then
      table.insert(fields, name)
      table.insert(fields, job[name])
    end
  end
  redis.call('HSET', job.key, unpack(fields))
  note(key.jobs(job.tenant), job)
  if job.video then note(key.videos(job.tenant), job) end
  if job.batch ~= '' then note(key.batch_jobs(job.tenant, job.batch), job) end
  if job.group ~= '' then note_group(job) end
  note_family(job)
  if job.input ~= '' then inputs.hold(job.tenant, job.input) end
  sources.hold(job.id, job.sources, now)
  total, of_tenant[job.tenant] = total + 1, of_tenant[job.tenant] + 1
end

-- Set `parents`, those of the jobs `after` which it is to run that have not ended. Returns the place and the state of one that
-- it cannot wait for, or nil.
local function wrong_parent(job)
  local left, at = {}, 0
  for parent in string.gmatch(job.after, '%S+') do
    local known = redis.call('HMGET', key.job(parent), 'state', 'tenant')
    local state = known[2] == job.tenant and known[1] or 'gone'
    local is_source = sources.has(job.sources, parent)
    if is_source and redis.call('ZCARD', key.dependents(parent)) >= conf.max_children then return at, 'full' end
    if state == 'queued' or state == 'running' then
      if redis.call('ZCARD', key.children(parent)) >= conf.max_children then return at, 'full' end
      table.insert(left, parent)
    elseif state == 'gone' or (state ~= 'succeeded' and (is_source or job.on_parent ~= 'run')) then
      return at, state
    end
    at = at + 1
  end
  if left[1] then job.parents = table.concat(left, ' ') else job.on_parent = nil end
end

local function submit(job)
  job.key = key.job(job.id)
  if redis.call('EXISTS', job.key) == 1 then
    deadlines[job.id] = redis.call('HGET', job.key, 'deadline')
    return {'ok', job.id}
  end
  local idem, fingerprint = nil, nil
  if job.idempotency ~= '' then
    local digest
    digest, fingerprint = string.match(job.idempotency, '^(%S+) (.*)$')
    idem = key.idempotency(job.tenant, digest)
    local known = redis.call('GET', idem)
    if known then
      local known_id, known_print = string.match(known, '^(%S+) (.*)$')
      -- Also of a job whose record is deleted: a key makes one job.
      if known_id then return {known_print == fingerprint and 'replayed' or 'mismatch', known_id} end
    end
  end
  local limit, resets = unpack(spent_by(job.tenant))
  if limit then return {'quota', limit, whole(resets)} end
  if has_its_share(job.tenant) then return full('tenant_full', limit_of(job.tenant)) end
  if total >= conf.max_queued_jobs then return full('full', conf.max_queued_jobs) end
  if job.group ~= '' and begins_too_many_groups(job) then return {'quota', 'groups', ''} end
  local at, state = wrong_parent(job)
  if at then return {'parent', at, state} end
  local deleted
  job.input, deleted = inputs.find(job.tenant, job.input)
  if deleted then return {'input', deleted} end
  job.size = footprint.of_job(job.wire, job.group, 0, 0, 0)
  local quota = exceeded_quota(job, idem)
  if quota then return {'quota', quota, ''} end
  enter(job)
  if job.sync_call ~= '' then
    local digest, process = string.match(job.sync_call, '^(%S+) (%S+)$')
    local name = key.sync_calls(job.tenant, digest)
    redis.call('ZADD', name, 1, job.id .. ' ' .. process)
    redis.call('ZREMRANGEBYRANK', name, conf.max_sync_calls, -1)
    redis.call('PEXPIRE', name, conf.sync_call_ms)
  end
  if idem then redis.call('SET', idem, job.id .. ' ' .. fingerprint, 'PX', conf.idempotency_ms) end
  return {'ok', job.id}
end

for at, job in ipairs(args.jobs) do out[at] = submit(job) end
for tenant, more in pairs(kept_more) do footprint.add(tenant, more) end
for index, rows in pairs(indexed) do queue.add_all(index, rows) end
for name in pairs(families) do redis.call('ZREMRANGEBYRANK', name, 0, -conf.max_children - 1) end
for _, one in pairs(grouped) do groups.add(one.tenant, one.group, one.rows, now) end
for _, job in ipairs(arrivals) do
  -- The signature's field `batch` is max_batch.
  redis.call('HSET', key.signature(job.sig), 'model', job.model, 'window', job.window, 'batch', job.max_batch)
  queue.record_arrival(job.sig, job.window, now)
end
local free = {}
for _, group in ipairs(added) do
  queue.count(group.sig, group.rank, group.tenant, group.jobs, group.slots)
  local lanes = key.lanes(group.sig, group.rank)
  if group.dated or redis.call('ZADD', lanes, 'NX', whole(stream_ms(group.first)), group.tenant) == 1 then
    queue.update_lanes({group})
  end
  -- A tenant at its quota wakes no worker.
  free[group.sig] = free[group.sig] or not tenants.is_deferred(group.tenant, group.model, group.rank)
  -- Remove expired jobs from the index even if no sweep runs.
  for _, old in ipairs(redis.call('ZRANGE', key.jobs(group.tenant), 0, 3)) do
    if redis.call('EXISTS', key.job(old)) == 0 then redis.call('ZREM', key.jobs(group.tenant), old) end
  end
end
local wake = false
for _, job in ipairs(arrivals) do
  wake = queue.refresh(job.sig, now, true) and free[job.sig] or wake
end
if wake then wakeups.wake_noted() end
for _, reply in ipairs(args.positions and out or {}) do
  if reply[1] == 'ok' then reply[3], reply[4] = place.of(reply[2]), deadlines[reply[2]] end
end
return out
