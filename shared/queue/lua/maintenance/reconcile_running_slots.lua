-- RUNS when Redis is full
-- Repair the counters of running slots by tenant, from the jobs with a lease.
-- Returns  1 if they were wrong, else 0
local MANY = 5000
local ids = redis.call('ZRANGE', key.leases, 0, MANY - 1)
if #ids == MANY then return 0 end
local used, wrong = {}, 0
for _, id in ipairs(ids) do
  local job = redis.call('HMGET', key.job(id), 'state', 'tenant', 'slots')
  if job[1] == 'running' and job[2] then used[job[2]] = (used[job[2]] or 0) + (tonumber(job[3] or nil) or 1) end
end
local counted = redis.call('HGETALL', key.running_slots)
for at = 1, #counted, 2 do
  local tenant = counted[at]
  if used[tenant] ~= tonumber(counted[at + 1]) then
    wrong = 1
    redis.call('HDEL', key.running_slots, tenant)
  else
    used[tenant] = nil
  end
end
for tenant, slots in pairs(used) do
  wrong = 1
  redis.call('HSET', key.running_slots, tenant, slots)
end
return wrong
