-- NEEDS job_record inputs job_state
-- RUNS when Redis is full
-- Queue a dead letter's job again, to run solo. Its epoch continues, so that object keys never collide.
-- args     letter_id
-- Returns  1, or 0 for an unknown dead letter or a deleted record
local id, now = args.letter_id, clock_ms()
if not redis.call('ZSCORE', key.dead_letters, id) then return 0 end
local job = job_record.load(id)
if not job or job.state ~= 'failed' then return 0 end
redis.call('ZREM', key.dead_letters, id)
redis.call('DEL', key.dead_letter(id))
redis.call('PERSIST', key.job(id))
redis.call('ZREM', key.retention, job_record.row(job.tenant, id, job.batch, job.size))
redis.call('HDEL', key.job(id), 'finished', 'expires', 'error', 'artifacts', 'batching', 'timings', 'warnings', 'settled',
  'cancel', 'started', 'losses', 'attempts', 'deadline', 'start_by', 'steps', 'passed')
redis.call('HSET', key.job(id), 'solo', 1)
job.deadline, job.start_by = nil, nil
if job.input then inputs.hold(job.tenant, job.input) end
job_state.requeue(id, job, 'solo', now)
queue.refresh(job.sig, now)
queue.wake()
return 1
