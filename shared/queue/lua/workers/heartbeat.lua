-- NEEDS model_loads
-- RUNS when Redis is full
-- Record a worker's heartbeat, and forget workers without one.
-- ARGV     worker, info, ttl_ms, models...
--          `models`: those that the worker holds or loads
-- Returns  1
local now, ttl = clock_ms(), tonumber(ARGV[3])
redis.call('HSET', key.worker(ARGV[1]), 'info', ARGV[2], 'beat', whole(now))
redis.call('PEXPIRE', key.worker(ARGV[1]), ttl)
redis.call('ZADD', key.workers, whole(now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', key.workers, '-inf', whole(now - ttl))
-- Written before the clock was set back: a worker that is alive sends the next one soon.
redis.call('ZREMRANGEBYSCORE', key.workers, whole(now + ttl), '+inf')
redis.call('PEXPIRE', key.workers, 3600000)
for at = 4, #ARGV do model_loads.hold(ARGV[at], ARGV[1], now) end
return 1
