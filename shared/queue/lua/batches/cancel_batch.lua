-- NEEDS batch_turns
-- RUNS when Redis is full
-- Request the cancellation of a batch; one that is finalizing is not changed.
-- args     tenant, batch_id
-- Returns  1, or 0 for an unknown batch
local name, now = key.batch(args.tenant, args.batch_id), clock_ms()
local status = redis.call('HGET', name, 'status')
if not status then return 0 end
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', name, 'status', 'cancelling', 'cancelling_at', whole(now), 'canceled', 0)
  redis.call('HINCRBY', name, 'rev', 1)
  batch_turns.set_due(args.tenant, args.batch_id, now, now, true)
end
return 1
