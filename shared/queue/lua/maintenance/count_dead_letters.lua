-- NEEDS dead_letters
-- RUNS when Redis is full
-- Count the dead letters that have not expired.
-- Returns  how many
dead_letters.forget_expired(clock_ms())
return redis.call('ZCARD', key.dead_letters)
