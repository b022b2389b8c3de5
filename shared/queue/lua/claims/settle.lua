-- NEEDS job_record job_state
-- RUNS when Redis is full
-- End a job with its result, if the claim is still this worker's: result first, then state, then acknowledgement.
-- args     worker, job_id, epoch, token, state, artifacts, error, batching, timings, device_seconds, step, total, objects,
--          stored_bytes, wire, used, warnings, device_times, resumed
--          `token`: the same token settles once; `objects`, `stored_bytes`: of the artifacts; `wire`: what the job's wire form
--          becomes, without secrets that its end makes useless, none to keep it; `used`: microseconds of the device, computed
--          and skipped steps, images, videos and their bytes; `device_times`: as in device_times.learn;
--          `resumed`: steps that a checkpoint has spared; with any, its times are not learned
-- Returns  1, or 2 if jobs wait for it that are to be told, or 0 if the claim is no longer this worker's or the job has ended
local worker, id, epoch, token = args.worker, args.job_id, args.epoch, args.token
local now = clock_ms()

-- Update the mean time between completions, without idle time.
local function keep_pace(name, started)
  local known = redis.call('HMGET', name, 'done_gap', 'done')
  local gap = math.max(0, now - math.max(started, tonumber(known[2] or 0) or 0))
  local mean = tonumber(known[1] or nil)
  if mean then gap = mean + 0.1 * (gap - mean) end
  redis.call('HSET', name, 'done_gap', string.format('%.3f', gap), 'done', whole(now))
  redis.call('PEXPIRE', name, 3600000)
end

-- Update the mean cost of a slot and the mean rows of its forwards, of a signature and of its model.
local function learn_cost(name, seconds, rows)
  local known = redis.call('HMGET', key.slot_cost(name), 'slot_s', 'rows')
  local mean, mean_rows = tonumber(known[1] or nil), tonumber(known[2] or nil)
  if mean then seconds, rows = mean + 0.1 * (seconds - mean), mean_rows + 0.1 * (rows - mean_rows) end
  redis.call('HSET', key.slot_cost(name), 'slot_s', string.format('%.9g', seconds), 'rows', string.format('%.4g', rows))
  redis.call('PEXPIRE', key.slot_cost(name), 7 * 86400000)
end

local job = job_record.load(id)
if not job then return 0 end
if redis.call('HGET', key.job(id), 'settled') == token then return 1 + redis.call('EXISTS', key.ended_parents) end
if job.state ~= 'running' or job.worker ~= worker or tonumber(job.epoch) ~= epoch then return 0 end
-- A client that has canceled a job does not see it succeed.
local canceled = job.cancel and args.state == 'succeeded'
redis.call('HSET', key.job(id), 'settled', token, 'artifacts', canceled and '[]' or args.artifacts, 'batching', args.batching,
  'timings', args.timings, 'device_seconds', args.device_seconds, 'step', args.step, 'total', args.total)
if args.wire then
  job.job = args.wire
  redis.call('HSET', key.job(id), 'job', job.job)
end
if args.error then redis.call('HSET', key.job(id), 'error', args.error) else redis.call('HDEL', key.job(id), 'error') end
if args.warnings then redis.call('HSET', key.job(id), 'warnings', args.warnings) end
if args.resumed > 0 then redis.call('HSET', key.job(id), 'resumed', args.resumed) end
local result_bytes = #args.artifacts + #(args.error or '') + #args.batching + #args.timings + #(args.warnings or '')
local result = footprint.of_job(job.job or '', job.group, result_bytes, args.objects, args.stored_bytes)
job_record.resize(id, job, footprint.replaced(result, '', job.checkpoint_size))
job.used = usage.of_run(args.used, not canceled)
job_state.finish(id, job, canceled and 'canceled' or args.state, now)
job_state.unclaim(id, job, now, args.device_seconds)
if args.state == 'succeeded' and args.device_seconds > 0 and args.resumed == 0 then
  local each, rows = args.device_seconds / job.slots, tonumber(cjson.decode(args.batching).mean_rows) or 1
  learn_cost(job.sig, each, rows)
  learn_cost('model|' .. job.model, each, rows)
  device_times.learn(job.sig, args.device_times, now)
end
local started = tonumber(job.started) or now
keep_pace(key.arrivals(job.sig), started)
keep_pace(key.completions, started)
queue.refresh(job.sig, now)
return 1 + redis.call('EXISTS', key.ended_parents)
