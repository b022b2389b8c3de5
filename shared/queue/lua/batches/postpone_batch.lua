-- NEEDS job_state
-- RUNS when Redis is full
-- Make an active batch due later.
-- ARGV     tenant, batch_id, again_ms
-- Returns  1
local now = clock_ms()
job_state.set_batch_due(ARGV[1], ARGV[2], now + tonumber(ARGV[3]), now)
return 1
