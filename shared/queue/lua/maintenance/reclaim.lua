-- NEEDS job_state grace
-- RUNS when Redis is full
-- Requeue the jobs whose lease has expired, to run solo, or move them to the dead letters.
-- ARGV     limit
-- Returns  their ids
local now, out, touched = clock_ms(), {}, {}
local known = redis.call('HMGET', key.reclaims, 'last', 'gap')
local decision = grace.decide({now = now, last = tonumber(known[1] or nil), gap = tonumber(known[2] or nil), lease = conf.lease_ms})
redis.call('HSET', key.reclaims, 'last', whole(now), 'gap', whole(decision.gap or 0))
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.leases, '-inf', whole(decision.before), 'LIMIT', 0, ARGV[1])) do
  local job = job_state.load(id)
  if job and job.state == 'running' then
    job_state.lost(id, job, now)
    touched[job.sig] = true
    table.insert(out, id)
  else
    redis.call('ZREM', key.leases, id)
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if out[1] then queue.wake() end
return out
