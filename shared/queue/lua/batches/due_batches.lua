-- NEEDS batch_turns
-- RUNS when Redis is full
-- Claim due batches, at most one of a tenant, in turns of tenants; each is due again later in case its process is killed.
-- A tenant takes a place only while it holds fewer than are free.
-- args     places, again_ms, in_progress...
--          `places`: all of the process
-- Returns  'tenant|id' for each
local now, free, again = clock_ms(), args.places, args.again_ms
local MAX_TENANTS = 16 -- more than can have batches in progress, so that these hide no others
local LONGEST_MS = 60000 -- longer than any delay: a later time was written before the clock was set back
local running, claimed = {}, {}
for _, one in ipairs(args.in_progress) do
  running[one.tenant] = one.batches
  free = free - one.batches
end

local function late(name)
  return redis.call('ZRANGEBYSCORE', name, whole(now + LONGEST_MS), '+inf', 'LIMIT', 0, MAX_TENANTS)
end
for _, tenant in ipairs(late(key.batch_tenants)) do
  for _, id in ipairs(late(key.active_batches(tenant))) do redis.call('ZADD', key.active_batches(tenant), whole(now), id) end
  batch_turns.refresh(tenant, now)
end
for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', key.batch_tenants, '-inf', whole(now), 'LIMIT', 0, MAX_TENANTS)) do
  if (running[tenant] or 0) < free then
    local id = redis.call('ZRANGE', key.active_batches(tenant), 0, 0)[1]
    if id and redis.call('EXISTS', key.batch(tenant, id)) == 1 then
      redis.call('ZADD', key.active_batches(tenant), whole(now + again), id)
      table.insert(claimed, tenant .. '|' .. id)
      free = free - 1
    elseif id then
      redis.call('ZREM', key.active_batches(tenant), id)
    end
    batch_turns.refresh(tenant, now, true)
  end
end
return claimed
