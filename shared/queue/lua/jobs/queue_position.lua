-- NEEDS position
-- The position of a queued job among its signature's jobs, and what else delays it.
-- args     job_id
-- Returns  as `position.of`
return position.of(args.job_id)
