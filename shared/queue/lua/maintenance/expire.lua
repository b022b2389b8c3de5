-- NEEDS job_state
-- RUNS when Redis is full
-- End queued jobs whose deadline has passed.
-- ARGV     limit
-- Returns  how many ended
local now, count, touched = clock_ms(), 0, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.deadlines, '-inf', whole(now), 'LIMIT', 0, ARGV[1])) do
  local job = job_state.load(id)
  if job and job.state == 'queued' then
    job_state.leave_queue(id, job)
    job_state.finish(id, job, 'expired', now)
    touched[job.sig] = true
    count = count + 1
  else
    redis.call('ZREM', key.deadlines, id)
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
return count
