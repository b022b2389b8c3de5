-- NEEDS usage
-- RUNS when Redis is full
-- Count what a run has used that has lost or returned its claim, unless it has ended its job after all.
-- ARGV     tenant, model, job_id, token, used
--          `token`: of the run's `settle`; `used`: six numbers, as in `settle`
-- Returns  1, or 0 if `settle` has counted it
if redis.call('HGET', key.job(ARGV[3]), 'settled') == ARGV[4] then return 0, true end
usage.add(ARGV[1], ARGV[2], usage.of_run(ARGV[5], false), clock_ms())
return 1
