-- NEEDS batch_turns dead_letters events footprint inputs job_record job_state lane_changes latest_start queue tenants
-- NEEDS children groups later parents paused sources usage wakeups
-- Run what the caller has decided, if what it has read is still the same.
-- args     when_full, fences, writes, added...
--          `when_full`: also while Redis is full; `fences`: JSON list of commands with their replies by read_replies;
--          `writes`: JSON list of commands, and of FUNCTIONS with their arguments; `added`: sizes that the quotas of tenants
--          must allow
-- Returns  'ok', 'changed' or the name of the quota that is used up
local now = clock_ms()
local FUNCTIONS = {
  count_footprint = footprint.change, set_batch_due = batch_turns.set_due, refresh_batches = batch_turns.refresh,
  add_to_outbox = events.add_to_outbox, resume_tenant = tenants.resume, hold_inputs = inputs.hold,
  count_running = queue.count_running, remove_entry = queue.remove_entry,
}

-- Wake a worker for the queued jobs of a signature.
function FUNCTIONS.wake(sig) if wakeups.is_queued(sig) then wakeups.note(sig) end end

function FUNCTIONS.refresh_signature(sig) queue.refresh(sig, now) end
function FUNCTIONS.update_lane(model, sig, rank, tenant)
  queue.update_lanes({{model = model, sig = sig, rank = rank, tenant = tenant}})
end

function FUNCTIONS.bury(id, reason, detail) dead_letters.bury(id, reason, detail, now) end
function FUNCTIONS.forget_expired_letters() dead_letters.forget_expired(now) end
function FUNCTIONS.count_run(tenant, model, used) usage.add(tenant, model, usage.of_run(used, false), now) end
function FUNCTIONS.list_deadline(id) latest_start.list(id, job_record.load(id), now) end

function FUNCTIONS.leave_group(tenant, group, id) groups.remove(tenant, group, id) end

-- Note the state that a job has in its group.
function FUNCTIONS.note_group(id)
  local job = job_record.load(id)
  if not job then return end
  local is_paused = job.state == 'queued' and job.src == 'paused'
  groups.note(id, job, is_paused and 'paused' or job.state, now)
end

function FUNCTIONS.wait(id)
  local job = job_record.load(id)
  job.wait_until = job.wait_until or whole(now)
  later.add(id, job)
end

-- Let a job wait for its parents again; `ended`: 'parent=state' of those that have ended, separated by spaces.
function FUNCTIONS.wait_for_parents(id, ended)
  for parent, state in string.gmatch(ended, '(%S+)=(%a+)') do parents.tell(id, parent, state, now) end
  local job = job_record.load(id)
  if job and job.parents then children.link(id, job.parents, now) end
end

function FUNCTIONS.hold_sources(id, ids) sources.hold(id, ids, now) end

function FUNCTIONS.requeue(id, src)
  local job = job_record.load(id)
  job_state.requeue(id, job, src, now)
  queue.refresh(job.sig, now)
end

-- End a queued job that can no longer meet its deadline; another one past its latest start becomes late. `at`: its time in
-- the list in which it was due. With another time it has another deadline by now.
function FUNCTIONS.miss_start(list, id, at)
  if tonumber(redis.call('ZSCORE', list, id) or nil) ~= tonumber(at) then return end
  local job = job_record.load(id)
  if not job or job.state ~= 'queued' then return redis.call('ZREM', list, id) end
  if latest_start.is_missed(job, now) then job_state.expire(id, job, now) else job_state.become_late(id, job, now) end
end

-- End a pause that is due; `at`: when it was due.
function FUNCTIONS.end_pause(id, at)
  if tonumber(redis.call('ZSCORE', key.paused, id) or nil) ~= tonumber(at) then return end
  local job = job_record.load(id)
  if job and job.state == 'queued' and job.src == 'paused' then return job_state.end_pause(id, job, now) end
  redis.call('ZREM', key.paused, id)
  if job then paused.remove(id, job) end
end

-- Give a queued job another priority or deadline (ms), 0 for none; a negative value keeps the old one.
function FUNCTIONS.change_job(id, rank, deadline, steps)
  local job = job_record.load(id)
  lane_changes.leave(id, job)
  if rank >= 0 then job.rank = rank end
  redis.call('HSET', key.job(id), 'rank', job.rank)
  if deadline >= 0 then job_state.set_deadline(id, job, deadline > 0 and whole(deadline) or nil, steps, now) end
  lane_changes.enter(id, job, now)
end

-- Keep the unused ones of the input images of a job for `ms`.
function FUNCTIONS.keep_inputs(tenant, ids, ms)
  inputs.hold(tenant, ids)
  for input in string.gmatch(ids, '%S+') do inputs.release(tenant, input, now, ms) end
end

-- Keep an input image for `ms` from now, or as long as jobs use it.
function FUNCTIONS.keep_input(name, ms)
  local live = tonumber(redis.call('HGET', name, 'live') or nil) or 0
  if live > 0 then redis.call('PERSIST', name) else redis.call('PEXPIRE', name, whole(ms)) end
end

-- Count a queued job less, where it is counted.
function FUNCTIONS.uncount(sig, rank, tenant, slots)
  if (tonumber(redis.call('HGET', key.signature(sig), 'jobs:' .. rank) or nil) or 0) > 0 then
    queue.count(sig, rank, tenant, -1, -slots)
  end
end

-- Add to a number of a hash, without which it is 0.
function FUNCTIONS.add(name, field, amount)
  if redis.call('HINCRBY', name, field, whole(amount)) <= 0 then redis.call('HDEL', name, field) end
end

-- The score of a member of an index is that of the first member of another set; without any, it is removed.
function FUNCTIONS.index_first(index, member, set)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  if first[2] then redis.call('ZADD', index, first[2], member) else redis.call('ZREM', index, member) end
end

-- End the turn of a member of an index by its stream of entries: it goes last, or with its last entry.
function FUNCTIONS.end_outbox_turn(stream, index, member, at)
  if redis.call('XLEN', stream) > 0 then return redis.call('ZADD', index, whole(at), member) end
  redis.call('DEL', stream)
  redis.call('ZREM', index, member)
end

for _, fence in ipairs(cjson.decode(args.fences)) do
  if cjson.encode(redis.call(unpack(fence[1])) or false) ~= fence[2] then return 'changed', true end
end
for _, one in ipairs(args.added) do
  local quota = footprint.exceeded(footprint.read(one.tenant), footprint.numbers(one.size))
  if quota then return quota, true end
end
if args.when_full then redis.call('DEL', PREFIX) end
for _, one in ipairs(args.added) do footprint.change(one.tenant, '', one.size) end
for _, write in ipairs(cjson.decode(args.writes)) do
  local call = FUNCTIONS[write[1]]
  if call then call(unpack(write, 2)) else redis.call(unpack(write)) end
end
lane_changes.write(now)
wakeups.wake_noted()
return 'ok'
