-- NEEDS job_state
-- RUNS when Redis is full
-- Make a claimed batch due later; one that has become due since its claim stays due.
-- ARGV     tenant, batch_id, again_ms
-- Returns  1, or 0 for a batch that is due
local now = clock_ms()
if tonumber(redis.call('ZSCORE', key.active_batches(ARGV[1]), ARGV[2]) or 0) <= now then return 0 end
job_state.set_batch_due(ARGV[1], ARGV[2], now + tonumber(ARGV[3]), now)
return 1
