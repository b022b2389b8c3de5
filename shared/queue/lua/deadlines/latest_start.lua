-- Part of the scripts that queue or end jobs: the latest start of a job with a deadline, which is the deadline minus the
-- time that jobs of its signature take. A job's hash has it as `start_by`, with `steps` and `on_deadline`, 'run' for a job
-- that runs on when it can no longer meet its deadline. `deadlines` lists the queued jobs that can still meet theirs.

local latest_start = {}
-- What was learned counts for this time, or for four jobs. If it is wrong, all jobs can expire by it, and none corrects it.
local LEARNED_MS = 600000

-- Update the learned times of a signature: ms in which the engine ran a job, and each of its denoising steps. Neither the load
-- of a model, as few jobs wait for one, nor an upload during an outage.
function latest_start.learn(sig, run_ms, steps, now)
  if not run_ms or run_ms <= 0 or steps <= 0 then return end
  local known = redis.call('HMGET', key.slot_cost(sig), 'run_ms', 'step_ms')
  local run, step = tonumber(known[1] or nil), tonumber(known[2] or nil)
  run = run and run + 0.1 * (run_ms - run) or run_ms
  step = step and step + 0.1 * (run_ms / steps - step) or run_ms / steps
  redis.call('HSET', key.slot_cost(sig), 'run_ms', string.format('%.6g', run), 'step_ms', string.format('%.6g', step),
    'learned', whole(now))
end

local function learned(sig, now)
  local known = redis.call('HMGET', key.slot_cost(sig), 'run_ms', 'step_ms', 'learned')
  local run, step, at = tonumber(known[1] or nil), tonumber(known[2] or nil), tonumber(known[3] or nil)
  if run and step and at and now - at <= math.max(LEARNED_MS, 4 * run) then return run, step end
end

-- The mean time (ms) in which a signature's jobs run; 0 if nothing is learned.
function latest_start.run_ms(sig, now) return learned(sig, now) or 0 end

-- The latest start (ms) of a job with a deadline. Nothing is learned yet (step_ms is nil): the deadline itself, so that no
-- job expires by a guess.
function latest_start.of(deadline, step_ms, steps) return math.max(0, math.floor(deadline - (step_ms or 0) * steps)) end

-- Set job.start_by of a job with a deadline, and list it in `deadlines`. A job that runs on after its latest start has none.
function latest_start.set(id, job, now)
  local _, step_ms = learned(job.sig, now)
  local start_by = latest_start.of(tonumber(job.deadline), step_ms, tonumber(job.steps or nil) or 0)
  if job.on_deadline == 'run' and start_by <= now then return latest_start.clear(id, job) end
  job.start_by = whole(start_by)
  redis.call('HSET', key.job(id), 'start_by', job.start_by)
  redis.call('ZADD', key.deadlines, job.start_by, id)
end

function latest_start.clear(id, job)
  job.start_by = nil
  redis.call('HDEL', key.job(id), 'start_by')
  redis.call('ZREM', key.deadlines, id)
end

-- Whether a job can no longer meet its deadline and is to end.
function latest_start.is_missed(job, now)
  return job.deadline and job.start_by and job.on_deadline ~= 'run' and tonumber(job.start_by) <= now or false
end

-- The error of a job that expires in the queue.
function latest_start.error(job, now)
  local deadline, start_by = tonumber(job.deadline or nil) or 0, tonumber(job.start_by or nil) or 0
  local left, needed = deadline - now, deadline - start_by
  local message = 'the deadline passed while the job was queued'
  if left > 0 and needed > 0 then
    message = string.format('the deadline cannot be met: %.3g s are left, and jobs of this kind take about %.3g s; ' ..
      'send a later deadline_s, or on_deadline "run" to run it late', left / 1000, needed / 1000)
  end
  return cjson.encode({code = 'deadline_exceeded', message = message, retryable = false})
end
