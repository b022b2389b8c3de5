-- NEEDS job_state
-- RUNS when Redis is full
-- End queued jobs whose latest start has passed; those that run on lose their place among the jobs with a deadline.
-- ARGV     limit
-- Returns  how many ended
local now, count, touched = clock_ms(), 0, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.deadlines, '-inf', whole(now), 'LIMIT', 0, ARGV[1])) do
  local job = job_state.load(id)
  if job and job.state == 'queued' then
    if job.on_deadline == 'run' then
      job_state.run_late(id, job, now)
    else
      job_state.expire(id, job, now)
      count = count + 1
    end
    touched[job.sig] = true
  else
    redis.call('ZREM', key.deadlines, id)
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
return count
