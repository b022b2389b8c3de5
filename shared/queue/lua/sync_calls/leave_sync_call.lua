-- RUNS when Redis is full
-- Record that a request no longer waits for a job.
-- args     tenant, digest, call
--          `call`: 'job process'
-- Returns  the score for abandon_sync_call, false when the response was delivered or another process has taken over
local score = redis.call('ZADD', key.sync_calls(args.tenant, args.digest), 'XX', 'INCR', -1, args.call)
return score and tonumber(score)
