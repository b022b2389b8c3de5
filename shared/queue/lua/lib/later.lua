-- Part of the scripts that queue jobs or remove them: a job for later is queued, but in no lane and counted in none, until it
-- is due. Its field `wait_until` is when (ms): a paused job can have it too, any other job has none. With `parents` it is due
-- when these have ended, from when its time `limit` (ms) counts.

local later = {}

function later.add(id, job)
  job.src, job.entry = 'waiting', ''
  redis.call('HSET', key.job(id), 'src', 'waiting', 'entry', '', 'wait_until', job.wait_until)
  redis.call('ZADD', key.later, job.parents and '+inf' or job.wait_until, id)
  redis.call('SADD', key.later_jobs(job.tenant), id)
end

function later.remove(id, job)
  redis.call('ZREM', key.later, id)
  redis.call('SREM', key.later_jobs(job.tenant), id)
end

-- Set the deadline of a job that is due, and remove its fields of a job for later.
function later.forget(id, job)
  local limit = tonumber(redis.call('HGET', key.job(id), 'limit') or nil)
  if limit then
    job.deadline = whole(tonumber(job.wait_until) + limit)
    redis.call('HSET', key.job(id), 'deadline', job.deadline)
  end
  redis.call('HDEL', key.job(id), 'wait_until', 'window', 'max_batch', 'limit')
end

-- Whether a job is for later than now.
function later.waits(job, now) return job.parents or job.wait_until and tonumber(job.wait_until) > now end
