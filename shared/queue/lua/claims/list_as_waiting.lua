-- NEEDS model_loads wakeups
-- RUNS when Redis is full
-- Let a worker wait for wake-ups: idle, for all jobs of its models; busy, for jobs of its signature and interactive ones.
-- ARGV     worker, wait_ms, wakeups, idle, signature, models...
--          `wakeups`: those that the worker could not use, one a line; `signature`: with free slots, '' for none;
--          `models`: as in claim; without a signature and models the worker waits no more
-- Returns  {how many workers wait for what fewest wait for, 1 if jobs of `signature` are queued}
local worker, wait_ms, idle, sig, now = ARGV[1], tonumber(ARGV[2]), ARGV[4] == '1', ARGV[5], clock_ms()
local models = model_loads.models(6)
local stops = sig == '' and not models[1]

redis.call('DEL', key.waiting(worker))
for wakeup in string.gmatch(ARGV[3], '[^\n]+') do wakeups.pass_on(wakeup, idle, now) end
if stops then
  for _, wakeup in ipairs(redis.call('LRANGE', key.wakeup(worker), 0, -1)) do wakeups.pass_on(wakeup, false, now) end
  redis.call('DEL', key.wakeup(worker))
  return {0, 0}
end
local fewest = math.huge
for _, model in ipairs(models) do
  -- Workers that have the model in memory are woken first, those that could not load it last.
  local class = model.failed and 2 or model.load > 0 and 1 or 0
  fewest = math.min(fewest, wakeups.list(idle and 'any' or 'interactive', model.name, worker, class, now))
end
if sig ~= '' then fewest = math.min(fewest, wakeups.list('running', sig, worker, 0, now)) end
redis.call('SET', key.waiting(worker), idle and 'any' or 'busy ' .. sig, 'PX', wait_ms)
return {fewest, sig ~= '' and wakeups.is_queued(sig) and 1 or 0}
