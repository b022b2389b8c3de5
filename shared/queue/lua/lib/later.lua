-- Part of the scripts that queue jobs or remove them: a job for later is queued, but in no lane and counted in none, until it
-- is due. Its field `wait_until` is when (ms): a paused job can have it too, any other job has none.

local later = {}

function later.add(id, job)
  job.src, job.entry = 'waiting', ''
  redis.call('HSET', key.job(id), 'src', 'waiting', 'entry', '', 'wait_until', job.wait_until)
  redis.call('ZADD', key.later, job.wait_until, id)
  redis.call('SADD', key.later_jobs(job.tenant), id)
end

function later.remove(id, job)
  redis.call('ZREM', key.later, id)
  redis.call('SREM', key.later_jobs(job.tenant), id)
end

-- Remove the fields of a job for later from one that is due.
function later.forget(id) redis.call('HDEL', key.job(id), 'wait_until', 'window', 'max_batch') end

-- Whether a job is for later than now.
function later.waits(job, now) return job.wait_until and tonumber(job.wait_until) > now or false end
