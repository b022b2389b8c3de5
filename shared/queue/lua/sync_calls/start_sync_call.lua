-- RUNS when Redis is full
-- Record that a request waits for the job that it has created. The job is queued already: a full Redis does not refuse this.
-- ARGV     tenant, digest, job_id, most, keep_ms
--          `most`: jobs that are kept for equal requests
-- Returns  1
local name = key.sync_calls(ARGV[1], ARGV[2])
redis.call('ZADD', name, 'NX', 1, ARGV[3]) -- sent again, it does not undo a retry's join
redis.call('ZREMRANGEBYRANK', name, ARGV[4], -1)
redis.call('PEXPIRE', name, ARGV[5])
return 1
