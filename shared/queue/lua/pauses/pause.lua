-- RUNS when Redis is full
-- Pause everything, a model or a tenant; a repetition replaces the reason.
-- args     name, row, most
--          `name`: 'all', 'model|<id>' or 'tenant|<name>'; `most`: pauses at a time
-- Returns  1, or 0 if there are too many pauses
if redis.call('HEXISTS', key.pauses, args.name) == 0 and redis.call('HLEN', key.pauses) >= args.most then return 0 end
redis.call('HSET', key.pauses, args.name, args.row)
return 1
