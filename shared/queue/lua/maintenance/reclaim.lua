-- NEEDS job_record job_state grace
-- RUNS when Redis is full
-- Requeue the jobs whose lease has expired, to run solo, or move them to the dead letters. When the clock was set back,
-- bound the times that were written before: ends of leases, and when signatures are ready.
-- args     limit
-- Returns  their ids
local now, out, touched = clock_ms(), {}, {}
local AHEAD_MS, REFRESHED = 1000, 100
local known = redis.call('HMGET', key.reclaims, 'last', 'gap', 'refreshed', 'gaps')
local last, refreshed = tonumber(known[1] or nil), tonumber(known[3] or nil)
local decision = grace.decide({now = now, last = last, gap = tonumber(known[2] or nil), gaps = tonumber(known[4] or nil),
  lease = conf.lease_ms})
redis.call('HSET', key.reclaims, 'last', whole(now), 'gap', whole(decision.gap or 0), 'gaps', decision.gaps)

local latest = now + conf.lease_ms
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.leases, whole(latest + AHEAD_MS), '+inf', 'LIMIT', 0, args.limit)) do
  redis.call('ZADD', key.leases, whole(latest), id)
end
if last and last > now + AHEAD_MS then refreshed = 0 end
if refreshed then
  local signatures = redis.call('ZRANGE', key.signatures, refreshed, refreshed + REFRESHED - 1)
  for _, sig in ipairs(signatures) do queue.refresh(sig, now) end
  if signatures[REFRESHED] then redis.call('HSET', key.reclaims, 'refreshed', refreshed + REFRESHED)
  else redis.call('HDEL', key.reclaims, 'refreshed') end
  queue.wake()
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.leases, '-inf', whole(decision.before), 'LIMIT', 0, args.limit)) do
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
if out[1] then queue.wake() end
return out
