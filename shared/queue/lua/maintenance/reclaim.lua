-- NEEDS job_record job_state
-- RUNS when Redis is full
-- Requeue the jobs whose lease has expired, to run solo, or move them to the dead letters. Ends of leases that
-- were written before the clock was set back are bounded.
-- args     limit, decided, before, gap, gaps
--          `before`: leases that ended earlier are expired; `gap`, `gaps`: as in `Grace`, of the time `decided`
-- Returns  their ids
local now, out, touched, AHEAD_MS = clock_ms(), {}, {}, 1000
-- An outage between decision and script is a gap that the next call must see.
if now - args.decided > AHEAD_MS then return out, true end
local last = tonumber(redis.call('HGET', key.reclaims, 'last') or nil)
if last and last > now + AHEAD_MS then redis.call('HSET', key.reclaims, 'refreshed', 0) end
redis.call('HSET', key.reclaims, 'last', whole(now), 'gap', whole(args.gap), 'gaps', args.gaps)

local latest = now + conf.lease_ms
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.leases, whole(latest + AHEAD_MS), '+inf', 'LIMIT', 0, args.limit)) do
  redis.call('ZADD', key.leases, whole(latest), id)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.leases, '-inf', whole(args.before), 'LIMIT', 0, args.limit)) do
  local job = job_record.load(id)
  if job and job.state == 'running' then
    job_state.lost(id, job, now)
    touched[job.sig] = true
    table.insert(out, id)
  else
    redis.call('ZREM', key.leases, id)
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if out[1] then wakeups.wake_noted() end
return out
