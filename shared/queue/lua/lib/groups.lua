-- NEEDS queue
-- Part of the scripts that create, change or delete jobs: the groups of a tenant, the jobs of each, and their states.
-- The score of a job in `group_states` is the place of its state times SPAN, plus when the state began (ms): how many jobs have
-- a state, and how many ended in the last minutes, are counts of ranges. A group lasts as long as it has jobs.

local groups = {}
local SPAN = 2 ^ 42
local PLACES = {queued = 0, paused = 1, running = 2, succeeded = 3, failed = 4, canceled = 5, expired = 6}

-- Whether a tenant has as many groups as it may have, and a job would begin one more.
function groups.is_full(tenant, group)
  local name = key.groups(tenant)
  return not redis.call('ZSCORE', name, group) and redis.call('ZCARD', name) >= conf.max_groups
end

-- Note the state of a job that its group counts.
function groups.note(id, job, state, now)
  if not job.group then return end
  redis.call('ZADD', key.group_states(job.tenant, job.group), whole(PLACES[state] * SPAN + now), id)
end

-- Note the end of a job, and the device time of its last run (us).
function groups.note_end(id, job, state, now, device_us)
  if not job.group then return end
  groups.note(id, job, state, now)
  if device_us > 0 then redis.call('HINCRBY', key.group(job.tenant, job.group), 'device_us', whole(device_us)) end
end

-- Begin a group, or note that a job is submitted to it.
function groups.begin(tenant, group, now)
  redis.call('ZADD', key.groups(tenant), whole(now), group)
  redis.call('HSETNX', key.group(tenant, group), 'first', whole(now))
end

-- Add queued jobs to a group: rows of `group_jobs`.
function groups.add(tenant, group, rows, now)
  queue.add_all(key.group_jobs(tenant, group), rows)
  local states = {}
  for at = 2, #rows, 2 do
    table.insert(states, whole(now))
    table.insert(states, rows[at])
  end
  queue.add_all(key.group_states(tenant, group), states)
end

-- Remove a deleted job from its group, and with the last one the group.
function groups.remove(tenant, group, id)
  local jobs = key.group_jobs(tenant, group)
  redis.call('ZREM', jobs, id)
  redis.call('ZREM', key.group_states(tenant, group), id)
  if redis.call('EXISTS', jobs) == 1 then return end
  redis.call('DEL', key.group(tenant, group), key.group_states(tenant, group))
  redis.call('ZREM', key.groups(tenant), group)
end
