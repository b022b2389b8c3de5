-- NEEDS tenants
-- RUNS when Redis is full
-- Replace the limits of a tenant, and wake workers for what its old ones held back.
-- args     tenant, limits...
--          `limits`: one without `most` is that of the settings
-- Returns  1
local tenant = args.tenant
for _, limit in ipairs(args.limits) do
  local field = tenant .. '|' .. limit.name
  if limit.most then
    redis.call('HSET', key.tenant_limits, field, limit.most)
  else
    redis.call('HDEL', key.tenant_limits, field)
  end
end
tenants.resume(tenant)
wakeups.wake_noted()
return 1
