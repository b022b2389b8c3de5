-- NEEDS job_state
-- RUNS when Redis is full
-- Count the dead letters that have not expired.
-- Returns  how many
job_state.forget_letters(clock_ms())
return redis.call('ZCARD', key.dead_letters)
