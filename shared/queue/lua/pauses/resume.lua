-- NEEDS tenants
-- RUNS when Redis is full
-- End a pause, and wake workers for what it held back.
-- args     name
--          `name`: as in pause
-- Returns  1, or 0 if it was not paused
local WAKES = 32 -- signatures of a model and priority, or of all, for which a worker is woken; each claim wakes the next
if redis.call('HDEL', key.pauses, args.name) == 0 then return 0 end
local kind, name = string.match(args.name, '^(%a+)|?(.*)$')
if kind == 'tenant' then
  tenants.resume(name)
elseif kind == 'model' then
  for rank = 0, 2 do
    for _, sig in ipairs(redis.call('ZRANGE', key.ready(name, rank), 0, WAKES - 1)) do wakeups.note(sig) end
  end
else
  for _, sig in ipairs(redis.call('ZREVRANGE', key.signatures, 0, WAKES - 1)) do
    if wakeups.is_queued(sig) then wakeups.note(sig) end
  end
end
wakeups.wake_noted()
return 1
