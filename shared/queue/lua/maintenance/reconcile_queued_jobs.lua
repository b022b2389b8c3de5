-- NEEDS job_state
-- RUNS when Redis is full
-- Repair the counters of queued jobs, in total and by tenant.
-- Returns  1 if they were wrong, else 0
local MANY = 1000
local total, outcome = 0, 0
local signatures = redis.call('ZRANGE', key.signatures, 0, MANY - 1)
for _, sig in ipairs(signatures) do
  for rank = 0, 2 do total = total + math.max(0, tonumber(redis.call('HGET', key.signature(sig), 'jobs:' .. rank) or 0) or 0) end
end
local counted = redis.call('HGETALL', key.queued_jobs)
for at = 1, #counted, 2 do if counted[at] ~= '*' then outcome = outcome + tonumber(counted[at + 1]) end end
if #signatures == MANY then return 0 end
if outcome == total and total == (tonumber(redis.call('HGET', key.queued_jobs, '*') or 0) or 0) then return 0 end
local tenants = {}
local function add(tenant, jobs) tenants[tenant] = (tenants[tenant] or 0) + jobs end
for _, sig in ipairs(signatures) do
  for rank = 0, 2 do
    for _, tenant in ipairs(redis.call('ZRANGE', key.lanes(sig, rank), 0, MANY - 1)) do
      add(tenant, queue.queued_in(key.lane(sig, rank, tenant)))
    end
  end
  for _, name in ipairs({key.front(sig), key.solo(sig)}) do
    for _, id in ipairs(redis.call('ZRANGE', name, 0, MANY - 1)) do
      local tenant = redis.call('HGET', key.job(id), 'tenant')
      if tenant then add(tenant, 1) end
    end
  end
end
redis.call('DEL', key.queued_jobs)
local sum = 0
for tenant, jobs in pairs(tenants) do
  if jobs > 0 then
    redis.call('HSET', key.queued_jobs, tenant, jobs)
    sum = sum + jobs
  end
end
if sum > 0 then redis.call('HSET', key.queued_jobs, '*', sum) end
return 1
