-- NEEDS groups
-- Part of the scripts that queue jobs or remove them: a paused job is queued, but in no lane and counted in none, until its
-- client resumes it. Its field `paused` is since when (ms); a running job with it goes there when its worker releases it.

local paused = {}

-- `paused` lists the paused jobs by when their pauses end: a pause lasts at most as long as results are kept, in which the time
-- until a job for later is due does not count.
function paused.add(id, job)
  local since = math.max(tonumber(job.paused), tonumber(job.wait_until or nil) or 0)
  job.src, job.entry = 'paused', ''
  redis.call('HSET', key.job(id), 'src', 'paused', 'entry', '')
  redis.call('ZADD', key.paused, whole(since + conf.retention_ms), id)
  redis.call('SADD', key.paused_jobs(job.tenant), id)
  groups.note(id, job, 'paused', tonumber(job.paused))
end

function paused.remove(id, job)
  redis.call('ZREM', key.paused, id)
  redis.call('SREM', key.paused_jobs(job.tenant), id)
end
