-- NEEDS position
-- The position of a queued job among its signature's jobs, and what else delays it.
-- ARGV     job_id
-- Returns  as `position.of`
return position.of(ARGV[1])
