-- NEEDS batch_turns
-- RUNS when Redis is full
-- Make a claimed batch due later; one that has become due since its claim stays due.
-- args     tenant, batch_id, again_ms
-- Returns  1, or 0 for a batch that is due
local now = clock_ms()
if tonumber(redis.call('ZSCORE', key.active_batches(args.tenant), args.batch_id) or 0) <= now then return 0 end
batch_turns.set_due(args.tenant, args.batch_id, now + args.again_ms, now)
return 1
