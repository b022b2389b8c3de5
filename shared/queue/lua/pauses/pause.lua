-- RUNS when Redis is full
-- Pause everything, a model or a tenant; a repetition replaces the reason.
-- ARGV     name, row, most
--          `name`: 'all', 'model|<id>' or 'tenant|<name>'; `most`: pauses at a time
-- Returns  1, or 0 if there are too many pauses
if redis.call('HEXISTS', key.pauses, ARGV[1]) == 0 and redis.call('HLEN', key.pauses) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', key.pauses, ARGV[1], ARGV[2])
return 1
