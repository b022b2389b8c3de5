-- NEEDS job_state
-- RUNS when Redis is full
-- Add a job that has ended to the dead letters.
-- ARGV     job_id, reason, detail
-- Returns  1
job_state.bury(ARGV[1], ARGV[2], ARGV[3], clock_ms())
redis.call('PEXPIRE', key.job(ARGV[1]), math.max(conf.retention_ms, conf.dead_ms))
return 1
