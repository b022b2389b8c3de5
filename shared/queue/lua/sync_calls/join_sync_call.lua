-- RUNS when Redis is full
-- Let a retry wait for the job of an earlier attempt: the one with the lowest score (see SyncCalls).
-- ARGV     tenant, digest
-- Returns  the job's id, or false
local name = key.sync_calls(ARGV[1], ARGV[2])
local jobs = redis.call('ZRANGE', name, 0, 0)
if not jobs[1] then return false end
redis.call('ZINCRBY', name, 1001, jobs[1])
redis.call('PEXPIRE', name, conf.sync_call_ms)
return jobs[1]
