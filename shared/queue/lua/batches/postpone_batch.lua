-- RUNS when Redis is full
-- Make an active batch due later.
-- ARGV     tenant, batch_id, again_ms
-- Returns  1
redis.call('ZADD', key.active_batches, 'XX', whole(clock_ms() + tonumber(ARGV[3])), ARGV[1] .. '|' .. ARGV[2])
return 1
