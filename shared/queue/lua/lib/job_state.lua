-- NEEDS queue footprint latest_start usage
-- Part of the scripts that change the state of jobs.

local job_state = {}
local FACTS = {'state', 'tenant', 'sig', 'model', 'rank', 'slots', 'src', 'entry', 'batch', 'input', 'solo', 'cancel',
  'losses', 'webhook', 'deadline', 'worker', 'epoch', 'arrived', 'started', 'attempts', 'returned', 'passed', 'job', 'video',
  'charged', 'size', 'start_by', 'on_deadline', 'steps'}

-- The fields of a job that scripts need, or nil.
function job_state.load(id)
  local values = redis.call('HMGET', key.job(id), unpack(FACTS))
  if not values[1] or not values[2] or not values[3] then return nil end
  local job = {}
  for at, name in ipairs(FACTS) do job[name] = values[at] or nil end
  job.rank, job.slots = tonumber(job.rank), tonumber(job.slots)
  return job
end

-- Time until a job's deadline (ms), 0 after it, -1 without one.
function job_state.time_left(job, now) return job.deadline and math.max(0, tonumber(job.deadline) - now) or -1 end

-- Time until a job's latest start (ms), -1 after it or without one.
function job_state.slack(job, now)
  local slack = job.start_by and tonumber(job.start_by) - now or -1
  return slack > 0 and slack or -1
end

local subscriptions = {} -- by tenant, the states that its endpoints want, as one text

-- Add an event to the outbox if an endpoint of the tenant wants its state, or for the `url` of the job's own webhook.
function job_state.add_to_outbox(event, id, tenant, state, url)
  local wanted = subscriptions[tenant]
  if not wanted then
    wanted = redis.call('HGET', key.webhook_endpoints(tenant), '*') or ''
    subscriptions[tenant] = wanted
  end
  if url or string.find(wanted, '|' .. state .. '|', 1, true) then
    redis.call('XADD', key.webhook_outbox(tenant), 'MAXLEN', '~', 100000, '*', 'event', event, 'job', id, 'state', state,
      'url', url or '')
    redis.call('ZADD', key.outbox_tenants, 'NX', whole(stream_ms(event)), tenant)
  end
end

-- Publish a state change; returns the event id. `hook` is '|state|state| url' of the job's own webhook.
function job_state.event(id, tenant, state, hook)
  local event = redis.call('XADD', key.events, 'MAXLEN', '~', 100000, '*', 'job', id, 'tenant', tenant, 'state', state)
  local states, url = string.match(hook or '', '^(%S+) (%S+)$')
  if not (states and string.find(states, '|' .. state .. '|', 1, true)) then url = nil end
  job_state.add_to_outbox(event, id, tenant, state, url)
  return event
end

-- Delete a job's record and its dead letter, and remove it from the indexes.
function job_state.delete(id, tenant, batch)
  redis.call('DEL', key.dead_letter(id))
  redis.call('ZREM', key.dead_letters, id)
  redis.call('DEL', key.job(id))
  redis.call('ZREM', key.jobs(tenant), id)
  redis.call('ZREM', key.videos(tenant), id)
  if batch then redis.call('ZREM', key.batch_jobs(tenant, batch), id) end
end

-- The row of a job in `retention`; size: from `footprint`, '' when nothing is counted any more.
function job_state.row(tenant, id, batch, size)
  return 'job|' .. tenant .. '|' .. id .. '|' .. (batch or '') .. '|' .. (size or '')
end

-- Delete a job that has ended; its objects are due for deletion at `due`.
function job_state.forget(id, job, due)
  job_state.delete(id, job.tenant, job.batch)
  footprint.change(job.tenant, job.size, '')
  redis.call('ZREM', key.retention, job_state.row(job.tenant, id, job.batch, job.size))
  redis.call('ZADD', key.retention, whole(due), job_state.row(job.tenant, id, job.batch, ''))
end

-- Replace the size of a job that has not ended.
function job_state.resize(id, job, size)
  footprint.change(job.tenant, job.size, size)
  redis.call('HSET', key.job(id), 'size', size)
  job.size = size
end

-- Set the deadline of a queued job (ms), which takes `steps`; nil: none. The job is in no lane meanwhile.
function job_state.set_deadline(id, job, deadline, steps, now)
  latest_start.clear(id, job)
  job.deadline, job.steps = deadline, steps
  if deadline then
    redis.call('HSET', key.job(id), 'deadline', deadline, 'steps', steps)
    latest_start.set(id, job, now)
  else
    redis.call('HDEL', key.job(id), 'deadline', 'steps')
  end
end

-- Change by `amount` how many jobs use an uploaded adapter; false for an id of an input image. Adapters are kept until deleted.
local function count_adapter_use(tenant, id, amount)
  if string.sub(id, 1, 8) ~= 'adapter_' then return false end
  local name = key.adapter(tenant, id)
  if redis.call('EXISTS', name) == 1 and redis.call('HINCRBY', name, 'live', amount) < 0 then redis.call('HSET', name, 'live', 0) end
  return true
end

-- Release one input image or adapter of a job; an image that is unused is kept for its own retention or as long as the job, if
-- that is longer.
local function release_input(tenant, input, now, job_ms)
  if count_adapter_use(tenant, input, -1) then return end
  local keep = math.max(conf.input_retention_ms, job_ms)
  local name = key.input(tenant, input)
  if redis.call('HINCRBY', name, 'live', -1) > 0 then return end
  redis.call('HSET', name, 'live', 0)
  redis.call('PEXPIRE', name, whole(keep))
  local stored = redis.call('HMGET', name, 'object', 'size')
  if not stored[1] then return end -- deleted before the job: its object has a row already or is deleted
  redis.call('ZADD', key.retention, whole(now + keep + 60000),
    'input|' .. tenant .. '|' .. input .. '|' .. stored[1] .. '|' .. (stored[2] or ''))
end

-- Keep the input images and adapters with these ids (separated by spaces) as long as the job needs them.
function job_state.hold_inputs(tenant, inputs)
  for input in string.gmatch(inputs, '%S+') do
    if not count_adapter_use(tenant, input, 1) then
      local name = key.input(tenant, input)
      redis.call('HINCRBY', name, 'live', 1)
      redis.call('PERSIST', name)
    end
  end
end

-- Set the next turn of a tenant with active batches: when its first one is due, but not before its last turn.
-- `served`: this is its turn.
function job_state.refresh_turn(tenant, now, served)
  local first = redis.call('ZRANGE', key.active_batches(tenant), 0, 0, 'WITHSCORES')
  if not first[2] then return redis.call('ZREM', key.batch_tenants, tenant) end
  local last = served and now or tonumber(redis.call('ZSCORE', key.batch_tenants, tenant) or 0)
  local at = last <= now and math.max(last, tonumber(first[2])) or tonumber(first[2])
  redis.call('ZADD', key.batch_tenants, whole(at), tenant)
end

-- Make a batch due at a time; one that is not active only if it is `new`.
function job_state.set_batch_due(tenant, batch, at, now, new)
  if new then redis.call('ZADD', key.active_batches(tenant), whole(at), batch)
  else redis.call('ZADD', key.active_batches(tenant), 'XX', whole(at), batch) end
  job_state.refresh_turn(tenant, now)
end

local ENDED_BATCH = {completed = true, failed = true, expired = true, cancelled = true}

-- Count a job of a batch as ended, once and before the end of the batch, and make the batch due after its last job. Returns until when the job must be
-- kept: the batch reads it at its end.
local function count_in_batch(id, job, state, now)
  if not job.batch then return 0 end
  local name = key.batch(job.tenant, job.batch)
  local batch = redis.call('HMGET', name, 'keep_until', 'accepted', 'status')
  if not batch[1] then return 0 end
  if ENDED_BATCH[batch[3]] then return tonumber(batch[1]) end
  if redis.call('HSETNX', key.job(id), 'counted', 1) == 1 then
    redis.call('HINCRBY', name, state == 'succeeded' and 'completed' or 'failed', 1)
    local ended = redis.call('HINCRBY', name, 'ended', 1)
    if ended >= (tonumber(batch[2] or nil) or 0) then
      job_state.set_batch_due(job.tenant, job.batch, now, now)
    end
  end
  return tonumber(batch[1])
end

-- End a job that is neither queued nor running any more. `job.used`: what its last run has used, by name.
function job_state.finish(id, job, state, now, keep_ms)
  local keep = math.max(keep_ms or conf.retention_ms, count_in_batch(id, job, state, now) - now)
  local event = job_state.event(id, job.tenant, state, job.webhook)
  if job.video then -- OpenAI's event name
    job_state.add_to_outbox(event .. '-video', id, job.tenant, state == 'succeeded' and 'video.completed' or 'video.failed')
  end
  redis.call('HSET', key.job(id), 'state', state, 'finished', whole(now), 'expires', whole(now + keep), 'event', event)
  redis.call('HDEL', key.job(id), 'phase', 'entry', 'src', 'returned', 'charged')
  redis.call('PEXPIRE', key.job(id), keep)
  latest_start.unlist(id, job)
  redis.call('ZADD', key.retention, whole(now + keep), job_state.row(job.tenant, id, job.batch, job.size))
  local used = job.used or {}
  used[state] = 1
  usage.add(job.tenant, job.model, used, now)
  for input in string.gmatch(job.input or '', '%S+') do release_input(job.tenant, input, now, keep_ms or 0) end
end

-- Keep the record and the objects of a job that has ended for `ms` from now, if that is longer.
function job_state.keep(id, job, ms, now)
  if redis.call('PTTL', key.job(id)) >= ms then return end
  redis.call('HSET', key.job(id), 'expires', whole(now + ms))
  redis.call('PEXPIRE', key.job(id), ms)
  redis.call('ZADD', key.retention, whole(now + ms), job_state.row(job.tenant, id, job.batch, job.size))
  for input in string.gmatch(job.input or '', '%S+') do
    job_state.hold_inputs(job.tenant, input)
    release_input(job.tenant, input, now, ms)
  end
end

-- Forget dead letters that have expired: all before a time, and some whose hash is gone.
function job_state.forget_letters(now)
  redis.call('ZREMRANGEBYSCORE', key.dead_letters, '-inf', whole(now - conf.dead_ms))
  for _, id in ipairs(redis.call('ZRANGE', key.dead_letters, 0, 99)) do
    if redis.call('EXISTS', key.dead_letter(id)) == 1 then return end
    redis.call('ZREM', key.dead_letters, id)
  end
end

function job_state.bury(id, reason, detail, now)
  job_state.forget_letters(now)
  redis.call('INCR', key.dead_letters_added)
  redis.call('ZADD', key.dead_letters, whole(now), id)
  redis.call('HSET', key.dead_letter(id), 'at', whole(now), 'reason', reason, 'detail', detail)
  redis.call('PEXPIRE', key.dead_letter(id), conf.dead_ms)
  local surplus = redis.call('ZCARD', key.dead_letters) - conf.dead_cap
  if surplus > 0 then
    for _, old in ipairs(redis.call('ZRANGE', key.dead_letters, 0, surplus - 1)) do redis.call('DEL', key.dead_letter(old)) end
    redis.call('ZREMRANGEBYRANK', key.dead_letters, 0, surplus - 1)
  end
end

-- Queue a job again: in 'front' of the lanes, 'solo', to run without batch mates, or 'dated', by its latest start.
function job_state.requeue(id, job, src, now)
  local arrived = tonumber(job.arrived) or now
  if job.deadline then
    latest_start.clear(id, job)
    latest_start.set(id, job, now)
  end
  if src == 'dated' and not job.start_by then src = 'front' end
  redis.call('HSET', key.job(id), 'state', 'queued', 'src', src, 'entry', '', 'returned', whole(now),
    'event', job_state.event(id, job.tenant, 'queued', job.webhook))
  redis.call('HDEL', key.job(id), 'phase', 'worker', 'step', 'total', 'charged')
  job.src = src
  queue.add_returned(id, job, arrived)
  redis.call('HSET', key.signature(job.sig), 'model', job.model)
  redis.call('HSETNX', key.signature(job.sig), 'window', 0)
  queue.count(job.sig, job.rank, job.tenant, 1, job.slots)
  queue.update_lane(job, queue.head(key.lane(job.sig, job.rank, job.tenant)))
end

-- Remove a running job's lease, entry and counters; the caller sets its next state. device_seconds: what it has cost its tenant.
function job_state.unclaim(id, job, now, device_seconds)
  redis.call('ZREM', key.leases, id)
  if redis.call('HINCRBY', key.claimed_jobs, job.worker or '', -1) <= 0 then redis.call('HDEL', key.claimed_jobs, job.worker or '') end
  if redis.call('HINCRBY', key.signature(job.sig), 'running', -1) <= 0 then redis.call('HDEL', key.signature(job.sig), 'running') end
  tenants.correct_charge(job, device_seconds or 0, now)
  queue.count_running(job.tenant, -job.slots)
  if job.src == 'lane' and (job.entry or '') ~= '' then -- claimed by an older version, whose entry stays until now
    local lane = key.lane(job.sig, job.rank, job.tenant)
    queue.remove_entry(lane, job.entry)
    if queue.sweep_lane(lane) then redis.call('ZREM', key.lanes(job.sig, job.rank), job.tenant) end
  end
end

-- Remove a queued job from the queue.
function job_state.leave_queue(id, job)
  local lane = key.lane(job.sig, job.rank, job.tenant)
  if job.src == 'lane' then queue.remove_entry(lane, job.entry) else queue.remove_returned(id, job) end
  queue.update_lane(job, queue.head(lane))
  queue.count(job.sig, job.rank, job.tenant, -1, -job.slots)
  if tenants.end_reservation(job.tenant, id) and tenants.resume(job.tenant) then queue.wake() end
end

-- End a queued job that can no longer meet its deadline.
function job_state.expire(id, job, now)
  redis.call('HSET', key.job(id), 'error', latest_start.error(job, now))
  job_state.leave_queue(id, job)
  job_state.finish(id, job, 'expired', now)
end

-- Let a queued job wait on after its latest start: without slack it goes with the jobs without a deadline, the last in its lane.
function job_state.become_late(id, job, now)
  if job.src == 'dated' then
    queue.remove_returned(id, job)
    job.src, job.entry = 'lane', queue.append(id, job, '*')
    redis.call('HSET', key.job(id), 'src', 'lane', 'entry', job.entry)
    queue.note_moves(job.sig, job.rank, job.tenant, 1)
    queue.update_lane(job, queue.head(key.lane(job.sig, job.rank, job.tenant)))
  end
  latest_start.set_late(id, job, now)
end

-- A worker lost this job: its lease expired, or it names a cause. Only a loss while solo counts as the job's own.
function job_state.lost(id, job, now, cause)
  job_state.unclaim(id, job, now)
  if job.cancel then return job_state.finish(id, job, 'canceled', now) end
  if job.solo then
    local losses = redis.call('HINCRBY', key.job(id), 'losses', 1)
    if losses >= conf.max_attempts then
      local outcome = 'the worker was lost ' .. losses .. ' times while it ran this job solo'
      if cause then outcome = cause .. ' while it ran this job solo (loss ' .. losses .. ' of ' .. conf.max_attempts .. ')' end
      redis.call('HSET', key.job(id), 'error', cjson.encode({code = 'worker_lost', message = outcome, retryable = false}))
      job_state.finish(id, job, 'failed', now, math.max(conf.retention_ms, conf.dead_ms))
      return job_state.bury(id, 'worker_lost', outcome, now)
    end
  end
  redis.call('HSET', key.job(id), 'solo', 1)
  job_state.requeue(id, job, 'solo', now)
end

function job_state.release(id, job, now)
  job_state.unclaim(id, job, now)
  redis.call('HINCRBY', key.job(id), 'attempts', -1)
  if job.cancel then return job_state.finish(id, job, 'canceled', now) end
  job_state.requeue(id, job, job.solo and 'solo' or 'front', now)
end
