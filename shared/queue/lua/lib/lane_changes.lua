-- NEEDS queue
-- Part of the scripts that change many queued jobs: these leave and enter lanes one by one; the counters, indexes and
-- readiness of the lanes are written once, in the end.

local lane_changes = {}
local lanes, by_signature = {}, {}

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
  if job.src == 'lane' and job.entry then
    queue.acknowledge(key.lane(job.sig, job.rank, job.tenant), job.entry)
  else
    queue.remove_returned(id, job)
  end
  count(job, -1)
end

-- Add the entry of a job with its old id, the time of its arrival; false if the lane has a later one, which XADD refuses.
local function append(id, job)
  local lane = key.lane(job.sig, job.rank, job.tenant)
  if redis.call('EXISTS', lane) == 0 then redis.call('XGROUP', 'CREATE', lane, 'workers', '0', 'MKSTREAM') end
  local added = redis.pcall('XADD', lane, job.entry, 'job', id, 'slots', job.slots, 'number', queue.last_number(lane) + 1)
  return type(added) ~= 'table'
end

-- Add a queued job to the lane of its new rank by its arrival: at the end of the stream, or among the returned jobs if the
-- stream has later entries.
function lane_changes.enter(id, job, now)
  count(job, 1)
  if job.src == 'lane' and job.entry and append(id, job) then return end
  if job.src == 'lane' then
    job.src = 'front'
    redis.call('HSET', key.job(id), 'src', 'front', 'entry', '', 'returned', whole(now))
  end
  queue.add_returned(id, job, tonumber(job.arrived) or now)
end

-- Write the counters, indexes and readiness of the lanes that have changed.
function lane_changes.write(now)
  for sig, changed in pairs(by_signature) do
    for _, lane in ipairs(changed) do
      queue.update_lane(lane, queue.head(key.lane(lane.sig, lane.rank, lane.tenant)))
    end
    queue.count_all(sig, changed)
    queue.refresh(sig, now)
  end
end
