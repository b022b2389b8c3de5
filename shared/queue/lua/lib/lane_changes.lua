-- NEEDS later paused queue
-- Part of the scripts that change many queued jobs: these leave and enter lanes one by one; the counters, indexes and
-- readiness of the lanes are written once, in the end.

local lane_changes = {}
local lanes, by_signature, arrived = {}, {}, {}

local function count(job, jobs)
  local name = key.lane(job.sig, job.rank, job.tenant)
  local lane = lanes[name]
  if not lane then
    lane = {model = job.model, sig = job.sig, rank = job.rank, tenant = job.tenant, jobs = 0, slots = 0}
    lanes[name] = lane
    by_signature[job.sig] = by_signature[job.sig] or {}
    table.insert(by_signature[job.sig], lane)
  end
  lane.jobs, lane.slots = lane.jobs + jobs, lane.slots + jobs * job.slots
end

-- Remove a queued job from its lane.
function lane_changes.leave(id, job)
  if job.src == 'paused' then return paused.remove(id, job) end
  if job.src == 'waiting' then return later.remove(id, job) end
  queue.remove(id, job)
  count(job, -1)
end

-- Add a queued job to those of its lane that are not in its stream.
function lane_changes.add_returned(id, job, now)
  count(job, 1)
  queue.note_moves(job.sig, job.rank, job.tenant, 1) -- within its lane nothing is counted, and a recount can miss the job
  queue.add_returned(id, job, tonumber(job.arrived) or now)
end

-- Add a job that arrives at `at` (ms), now or before, to its lane: with a deadline by its latest start, otherwise at the end of
-- the stream, as an entry of that time unless the stream has later ones. Those of one time are numbered.
function lane_changes.arrive(id, job, at)
  count(job, 1)
  local name = key.lane(job.sig, job.rank, job.tenant)
  local last = arrived[name]
  local number = last and last.at == at and last.number + 1 or 0
  arrived[name] = {at = at, number = number, behind = last and last.behind}
  local order = string.format('%s.%03d', whole(at), math.min(999, 2 * number))
  job.src, job.entry = job.start_by and 'dated' or 'lane', ''
  if job.start_by then
    queue.add_returned(id, job, order)
  else
    local entry = not arrived[name].behind and queue.append(id, job, whole(at) .. '-' .. whole(number))
    arrived[name].behind = type(entry) ~= 'string'
    job.entry = arrived[name].behind and queue.append(id, job, '*') or entry
  end
  redis.call('HSET', key.job(id), 'src', job.src, 'entry', job.entry, 'arrived', order)
end

-- Add a queued job to the lane of its rank: with a deadline by its latest start, otherwise by its arrival, at the end of the
-- stream, or among the returned jobs if the stream has later entries.
function lane_changes.enter(id, job, now)
  if job.paused then return paused.add(id, job) end
  if job.src == 'waiting' then return later.add(id, job) end
  local in_lane = job.src == 'lane' or job.src == 'dated'
  if in_lane and job.start_by then
    job.src = 'dated'
    redis.call('HSET', key.job(id), 'src', 'dated', 'entry', '')
  elseif in_lane then
    if job.src == 'lane' and (job.entry or '') ~= '' and type(queue.append(id, job, job.entry)) ~= 'table' then
      return count(job, 1)
    end
    job.src = 'front'
    redis.call('HSET', key.job(id), 'src', 'front', 'entry', '', 'returned', whole(now))
  end
  lane_changes.add_returned(id, job, now)
end

-- Write the counters and indexes of the lanes that have changed, and with a time the readiness of their signatures.
function lane_changes.write(now)
  for sig, changed in pairs(by_signature) do
    queue.update_lanes(changed)
    queue.count_all(sig, changed)
    if now then queue.refresh(sig, now) end
  end
end
