-- NEEDS pauses wakeups
-- RUNS when Redis is full
-- Let a worker wait for wake-ups: idle, for all jobs of its models; busy, for jobs of its signature and interactive ones.
-- args     worker, wait_ms, wakeups, idle, signature, models...
--          `wakeups`: those that the worker could not use, one a line; `signature`: with free slots, '' for none;
--          without a signature and models the worker waits no more
-- Returns  {how many workers wait for what fewest wait for, 1 if jobs of `signature` are queued, 1 for a busy worker if
--          interactive jobs of its models are, the wake-ups that the worker keeps}
local worker, wait_ms, idle, sig, now = args.worker, args.wait_ms, args.idle, args.signature, clock_ms()
local models = args.models
local stops = sig == '' and not models[1]

redis.call('DEL', key.waiting(worker))
local kept = wakeups.pass_on(args.wakeups, idle and not stops, now)
if stops then
  wakeups.pass_on(table.concat(redis.call('LRANGE', key.wakeup(worker), 0, -1), '\n'), false, now)
  redis.call('DEL', key.wakeup(worker))
  return {0, 0, 0, {}}
end
local fewest = math.huge
for _, model in ipairs(models) do
  -- Workers that have the model in memory are woken first, those that could not load it last.
  local class = model.load_ms < 0 and 2 or model.load_ms > 0 and 1 or 0
  fewest = math.min(fewest, wakeups.list(idle and 'any' or 'interactive', model.name, worker, class, now))
end
if sig ~= '' then fewest = math.min(fewest, wakeups.list('running', sig, worker, 0, now)) end
redis.call('SET', key.waiting(worker), idle and 'any' or 'busy ' .. sig, 'PX', wait_ms)
local interactive = 0
for _, model in ipairs(idle and {} or pauses.without(models)) do
  interactive = math.max(interactive, redis.call('EXISTS', key.tenant_order(model.name, 0)))
end
return {fewest, sig ~= '' and wakeups.is_queued(sig) and 1 or 0, interactive, kept}
