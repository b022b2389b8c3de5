-- NEEDS device_times
-- Part of the scripts that queue or end jobs: the latest start of a job with a deadline, which is the deadline minus the
-- mean time of its signature's jobs. A job's hash has it as `start_by`, with `steps` and `on_deadline`, 'run' for a job that
-- runs on when it can no longer meet its deadline. `deadlines` lists the queued jobs before their latest start. After it a job
-- has no `start_by` and goes last. `late` lists those that are to end then: at the deadline minus the least time that they
-- take.

local latest_start = {}

-- The mean time (ms) in which a signature's jobs run; 0 if nothing is learned.
function latest_start.run_ms(sig, now) return (device_times.means(device_times.of(sig), now)) end

-- The latest start (ms) of a job with a deadline: the deadline itself if nothing is learned (step_ms, rest_ms are nil).
function latest_start.of(deadline, step_ms, steps, rest_ms)
  return math.max(0, math.floor(deadline - (rest_ms or 0) - (step_ms or 0) * steps))
end

-- The steps that are left of a job: of one with a checkpoint not all.
local function steps_of(job) return math.ceil((tonumber(job.steps or nil) or 0) * (tonumber(job.left or nil) or 1)) end

-- The least time (ms) that a job takes.
local function least_ms(job, now) return device_times.bound(device_times.of(job.sig), steps_of(job), now) end

-- Since when (ms) a job with a deadline cannot meet it on any device that is known.
local function missed_at(job, now) return math.max(0, math.ceil(tonumber(job.deadline) - least_ms(job, now))) end

-- Set job.start_by of a job with a deadline that is in no list, and list it.
function latest_start.set(id, job, now)
  local _, step_ms, rest_ms = device_times.means(device_times.of(job.sig), now)
  local start_by = latest_start.of(tonumber(job.deadline), step_ms, steps_of(job), rest_ms)
  if start_by <= now then return latest_start.set_late(id, job, now) end
  job.start_by = whole(start_by)
  redis.call('HSET', key.job(id), 'start_by', job.start_by)
  redis.call('ZADD', key.deadlines, job.start_by, id)
end

-- Let a job be late: it has no latest start any more.
function latest_start.set_late(id, job, now)
  latest_start.clear(id, job)
  latest_start.list(id, job, now)
end

-- List a queued job with a deadline if it is not listed; returns how many were added.
function latest_start.list(id, job, now)
  if job.start_by then return redis.call('ZADD', key.deadlines, 'NX', job.start_by, id) end
  if not job.deadline or job.on_deadline == 'run' then return 0 end
  return redis.call('ZADD', key.late, 'NX', whole(missed_at(job, now)), id)
end

-- Remove a job from its list.
function latest_start.unlist(id, job)
  if job.deadline then redis.call('ZREM', job.start_by and key.deadlines or key.late, id) end
end

function latest_start.clear(id, job)
  redis.call('ZREM', key.deadlines, id)
  redis.call('ZREM', key.late, id)
  redis.call('HDEL', key.job(id), 'start_by')
  job.start_by = nil
end

-- Whether a job can no longer meet its deadline and is to end.
function latest_start.is_missed(job, now)
  return job.deadline and job.on_deadline ~= 'run' and missed_at(job, now) <= now or false
end

-- The error of a job that expires in the queue.
function latest_start.error(job, now)
  local left, needed = (tonumber(job.deadline or nil) or 0) - now, least_ms(job, now)
  local message = 'the deadline passed while the job was queued'
  if left > 0 then
    message = string.format('the deadline cannot be met: %.3g s are left, and jobs of this kind take at least %.3g s; ' ..
      'send a later deadline_s, or on_deadline "run" to run it late', left / 1000, needed / 1000)
  end
  return cjson.encode({code = 'deadline_exceeded', message = message, retryable = false})
end
