-- NEEDS line ending
-- Put a dead letter's job back in line, to run alone. Its epoch goes on, so that object keys never collide.
-- KEYS[1]  prefix
-- ARGV     job id
-- Returns  1, or 0 when there is no such dead letter or its record is gone
local id, now = ARGV[1], clock_ms()
if not redis.call('ZSCORE', key.dead, id) then return 0 end
local job = ending.load(id)
if not job or job.state ~= 'failed' then return 0 end
redis.call('ZREM', key.dead, id)
redis.call('DEL', key.dead_letter(id))
redis.call('PERSIST', key.job(id))
redis.call('ZREM', key.retention, ending.row(job.tenant, id, job.batch))
redis.call('HDEL', key.job(id), 'finished', 'expires', 'error', 'artifacts', 'fusing', 'timings', 'settled', 'cancel',
  'started', 'losses', 'attempts', 'deadline', 'passed')
redis.call('HSET', key.job(id), 'alone', 1)
job.deadline = nil
if job.input then ending.hold_inputs(job.tenant, job.input) end
ending.queue_again(id, job, 'alone', now)
line.refresh(job.sig, now)
line.wake()
return 1
