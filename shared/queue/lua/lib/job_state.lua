-- NEEDS events inputs batch_turns children dead_letters job_record later paused queue latest_start usage groups sources
-- Part of the scripts that change the state of jobs.

local job_state = {}
local CHECKPOINT_LOSSES = 2 -- of workers that continued from it, after which a checkpoint counts as at fault

-- Set the deadline of a queued job (ms), which takes `steps`; nil: none. The job is in no lane meanwhile. One for later is
-- listed by it when it is due.
function job_state.set_deadline(id, job, deadline, steps, now)
  latest_start.clear(id, job)
  redis.call('HDEL', key.job(id), 'limit')
  job.deadline, job.steps = deadline, steps
  if deadline then
    redis.call('HSET', key.job(id), 'deadline', deadline, 'steps', steps)
    if job.src ~= 'waiting' then latest_start.set(id, job, now) end
  else
    redis.call('HDEL', key.job(id), 'deadline', 'steps')
  end
end

-- End a job that is neither queued nor running any more. `job.used`: what its last run has used, by name.
function job_state.finish(id, job, state, now, keep_ms)
  if job.checkpoint then -- a sweep deletes its objects
    job_record.set_checkpoint(id, job, nil, '')
    redis.call('ZADD', key.retention, whole(now), table.concat({'checkpoint', job.tenant, id, '', ''}, '|'))
  end
  local keep = math.max(keep_ms or conf.retention_ms, batch_turns.count_ended(id, job, state, now) - now)
  local event = events.publish(id, job.tenant, state, job.webhook)
  if job.video then -- OpenAI's event name
    events.add_to_outbox(event .. '-video', id, job.tenant, state == 'succeeded' and 'video.completed' or 'video.failed')
  end
  redis.call('HSET', key.job(id), 'state', state, 'finished', whole(now), 'expires', whole(now + keep), 'event', event)
  redis.call('HDEL', key.job(id), 'phase', 'entry', 'src', 'returned', 'charged', 'paused', 'wait_until', 'window',
    'max_batch', 'parents', 'on_parent', 'limit')
  if job.parents then children.unlink(id, job.parents) end
  if job.sources then sources.release(id, job.sources, now) end
  children.note_end(id, job.tenant, state, event, now)
  if job.paused then paused.remove(id, job) end
  if not sources.is_needed(id) then redis.call('PEXPIRE', key.job(id), keep) end
  latest_start.unlist(id, job)
  local place = (job.batch or '') .. (job.group and '/' .. job.group or '') -- as `EndedJob.row`
  local row = table.concat({'job', job.tenant, id, place, job.size or ''}, '|')
  redis.call('ZADD', key.retention, whole(now + keep), row)
  local used = job.used or {}
  used[state] = 1
  usage.add(job.tenant, job.model, used, now)
  groups.note_end(id, job, state, now, used.device_us or 0)
  for input in string.gmatch(job.input or '', '%S+') do inputs.release(job.tenant, input, now, keep_ms or 0) end
end

-- Queue a job again: in 'front' of the lanes, 'solo', to run without batch mates, or 'dated', by its latest start; one that
-- is to be paused in no lane.
function job_state.requeue(id, job, src, now)
  local arrived = tonumber(job.arrived) or now
  if job.deadline then
    latest_start.clear(id, job)
    latest_start.set(id, job, now)
  end
  if src == 'dated' and not job.start_by then src = 'front' end
  redis.call('HSET', key.job(id), 'state', 'queued', 'src', src, 'entry', '', 'returned', whole(now),
    'event', events.publish(id, job.tenant, 'queued', job.webhook))
  redis.call('HDEL', key.job(id), 'phase', 'worker', 'step', 'total', 'charged')
  job.src = src
  if job.paused then return paused.add(id, job) end
  groups.note(id, job, 'queued', now)
  queue.add_returned(id, job, arrived)
  redis.call('HSET', key.signature(job.sig), 'model', job.model)
  redis.call('HSETNX', key.signature(job.sig), 'window', 0)
  queue.count(job.sig, job.rank, job.tenant, 1, job.slots)
  queue.update_lanes({job})
end

-- Remove a running job's lease and counters; the caller sets its next state. device_seconds: what it has cost its
-- tenant.
function job_state.unclaim(id, job, now, device_seconds)
  redis.call('ZREM', key.leases, id)
  local worker, signature = job.worker or '', key.signature(job.sig)
  if redis.call('HINCRBY', key.claimed_jobs, worker, -1) <= 0 then redis.call('HDEL', key.claimed_jobs, worker) end
  if redis.call('HINCRBY', signature, 'running', -1) <= 0 then redis.call('HDEL', signature, 'running') end
  tenants.correct_charge(job, device_seconds or 0, now)
  queue.count_running(job.tenant, -job.slots)
end

-- Remove a queued job from the queue.
function job_state.leave_queue(id, job)
  if job.src == 'paused' then return paused.remove(id, job) end
  if job.src == 'waiting' then return later.remove(id, job) end
  queue.remove(id, job)
  queue.update_lanes({job})
  queue.count(job.sig, job.rank, job.tenant, -1, -job.slots)
  if tenants.end_reservation(job.tenant, id) and tenants.resume(job.tenant) then wakeups.wake_noted() end
end

-- End a queued job that can no longer meet its deadline.
function job_state.expire(id, job, now)
  redis.call('HSET', key.job(id), 'error', latest_start.error(job, now))
  job_state.leave_queue(id, job)
  job_state.finish(id, job, 'expired', now)
end

-- End a job whose pause has lasted as long as results are kept.
function job_state.end_pause(id, job, now)
  local message = 'the job was paused for as long as results are kept'
  redis.call('HSET', key.job(id), 'error', cjson.encode({code = 'pause_expired', message = message, retryable = false}))
  job_state.leave_queue(id, job)
  job_state.finish(id, job, 'expired', now)
end

-- Let a queued job wait on after its latest start: without slack it goes with the jobs without a deadline, the last in its
-- lane.
function job_state.become_late(id, job, now)
  if job.src == 'dated' then
    queue.remove_returned(id, job)
    job.src, job.entry = 'lane', queue.append(id, job, '*')
    redis.call('HSET', key.job(id), 'src', 'lane', 'entry', job.entry)
    queue.note_moves(job.sig, job.rank, job.tenant, 1)
    queue.update_lanes({job})
  end
  latest_start.set_late(id, job, now)
end

-- Let a job that a worker lost have batch mates again if a checkpoint is beyond the step at which it was lost. Each time it
-- must be further: of a job that is at fault the losses while it runs solo are counted at last.
function job_state.note_passed_step(id, job, step)
  local lost_at = job.solo and tonumber(redis.call('HGET', key.job(id), 'lost_at') or nil)
  if not lost_at or step <= lost_at then return end
  redis.call('HDEL', key.job(id), 'solo')
  redis.call('HSET', key.job(id), 'lost_at', whole(step))
  job.solo = nil
end

-- A worker lost this job: its lease expired, or it names a cause. Only a loss while solo counts as the job's own.
function job_state.lost(id, job, now, cause)
  job_state.unclaim(id, job, now)
  if job.cancel then return job_state.finish(id, job, 'canceled', now) end
  if job.checkpoint and redis.call('HINCRBY', key.job(id), 'checkpoint_losses', 1) >= CHECKPOINT_LOSSES then
    job_record.set_checkpoint(id, job, nil, '')
  end
  if job.solo then
    local losses = redis.call('HINCRBY', key.job(id), 'losses', 1)
    if losses >= conf.max_attempts then
      local outcome = 'the worker was lost ' .. losses .. ' times while it ran this job solo'
      if cause then outcome = cause .. ' while it ran this job solo (loss ' .. losses .. ' of ' .. conf.max_attempts .. ')' end
      redis.call('HSET', key.job(id), 'error', cjson.encode({code = 'worker_lost', message = outcome, retryable = false}))
      job_state.finish(id, job, 'failed', now, math.max(conf.retention_ms, conf.dead_ms))
      return dead_letters.bury(id, 'worker_lost', outcome, now)
    end
  end
  local steps = redis.call('HMGET', key.job(id), 'step', 'lost_at')
  local lost_at = math.max(tonumber(steps[1] or nil) or 0, tonumber(steps[2] or nil) or 0)
  redis.call('HSET', key.job(id), 'solo', 1, 'lost_at', whole(lost_at))
  job_state.requeue(id, job, 'solo', now)
end

function job_state.release(id, job, now)
  job_state.unclaim(id, job, now)
  redis.call('HINCRBY', key.job(id), 'attempts', -1)
  if job.cancel then return job_state.finish(id, job, 'canceled', now) end
  job_state.requeue(id, job, job.solo and 'solo' or 'front', now)
end
