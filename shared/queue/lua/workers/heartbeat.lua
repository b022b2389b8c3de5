-- NEEDS model_loads
-- RUNS when Redis is full
-- Record a worker's heartbeat, and forget workers without one.
-- args     worker, info, ttl_ms, models...
--          `models`: those that the worker holds or loads
-- Returns  1
local now, ttl = clock_ms(), args.ttl_ms
redis.call('HSET', key.worker(args.worker), 'info', args.info, 'beat', whole(now))
redis.call('PEXPIRE', key.worker(args.worker), ttl)
redis.call('ZADD', key.workers, whole(now), args.worker)
redis.call('ZREMRANGEBYSCORE', key.workers, '-inf', whole(now - ttl))
-- Written before the clock was set back: a worker that is alive sends the next one soon.
redis.call('ZREMRANGEBYSCORE', key.workers, whole(now + ttl), '+inf')
redis.call('PEXPIRE', key.workers, 3600000)
for _, model in ipairs(args.models) do model_loads.hold(model, args.worker, now) end
return 1
