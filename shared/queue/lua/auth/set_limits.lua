-- NEEDS tenants
-- RUNS when Redis is full
-- Replace the limits of a tenant, and wake workers for what its old ones held back.
-- ARGV     tenant, limits...
--          `limits`: the name and the value of each, '' for the limit in the settings
-- Returns  1
local tenant = ARGV[1]
for at = 2, #ARGV, 2 do
  local field = tenant .. '|' .. ARGV[at]
  if ARGV[at + 1] == '' then
    redis.call('HDEL', key.tenant_limits, field)
  else
    redis.call('HSET', key.tenant_limits, field, ARGV[at + 1])
  end
end
tenants.resume(tenant)
wakeups.wake_noted()
return 1
