-- NEEDS model_loads wakeups
-- RUNS when Redis is full
-- Record a worker's heartbeat; once a second, forget workers without one and wake others for overdue jobs.
-- args     worker, info, ttl_ms, served, digest, models...
--          `served`: models of which it claims jobs, one a line, and their `digest`; `models`: those that it holds
-- Returns  1 if jobs for later are due or to be told, otherwise 0
local now, ttl = clock_ms(), args.ttl_ms
redis.call('HSET', key.worker(args.worker), 'info', args.info, 'beat', whole(now))
redis.call('PEXPIRE', key.worker(args.worker), ttl)
redis.call('ZADD', key.workers, whole(now), args.worker)
if wakeups.wake_again(args.served, args.digest, now) then
  redis.call('ZREMRANGEBYSCORE', key.workers, '-inf', whole(now - ttl))
  -- Written before the clock was set back: a worker that is alive sends the next one soon.
  redis.call('ZREMRANGEBYSCORE', key.workers, whole(now + ttl), '+inf')
  redis.call('PEXPIRE', key.workers, 3600000)
end
for _, model in ipairs(args.models) do model_loads.hold(model, args.worker, now) end
local due = redis.call('ZCOUNT', key.later, '-inf', whole(now)) + redis.call('EXISTS', key.ended_parents)
return due > 0 and 1 or 0
