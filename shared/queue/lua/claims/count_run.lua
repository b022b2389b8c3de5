-- NEEDS usage
-- RUNS when Redis is full
-- Count what a run has used that has lost or returned its claim, unless it has ended its job after all.
-- args     tenant, model, job_id, token, used
--          `token`: of the run's `settle`; `used`: six numbers, as in `settle`
-- Returns  1, or 0 if `settle` has counted it
if redis.call('HGET', key.job(args.job_id), 'settled') == args.token then return 0, true end
usage.add(args.tenant, args.model, usage.of_run(args.used, false), clock_ms())
return 1
