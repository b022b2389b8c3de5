-- NEEDS place
-- Read what decides the position of a queued job, and why it waits.
-- args     job_id
-- Returns  as `place.of`
return place.of(args.job_id)
