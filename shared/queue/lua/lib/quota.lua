-- Part of claim and join: the limit of a tenant's running slots. A batch `b` keeps what it knows in b.quotas, and the tenants
-- whose jobs did not start because of it in b.short.

local quota = {}

-- Read limits and running slots of the tenants that the batch does not know yet.
function quota.learn(b, tenants)
  local unknown, fields = {}, {}
  for _, tenant in ipairs(tenants) do
    if b.quotas[tenant] == nil then
      table.insert(unknown, tenant)
      table.insert(fields, tenant .. '|running_slots')
    end
  end
  if not unknown[1] then return end
  local own = redis.call('HMGET', key.tenant_limits, unpack(fields))
  for at, tenant in ipairs(unknown) do
    local most = tonumber(own[at] or nil) or conf.max_running_slots_per_tenant
    b.quotas[tenant] = most > 0 and {most = most, used = tonumber(redis.call('HGET', key.running_slots, tenant) or nil) or 0}
  end
end

-- Whether a tenant can have `slots` more. A job above its tenant's limit starts while no other job of the tenant runs;
-- otherwise it would never start.
function quota.allows(b, tenant, slots)
  quota.learn(b, {tenant})
  local own = b.quotas[tenant]
  if not own or own.used <= 0 or own.used + slots <= own.most then return true end
  b.short[tenant] = true
  return false
end

function quota.bound(b, tenant) return b.quotas[tenant] and true or false end

function quota.use(b, tenant, slots)
  if b.quotas[tenant] then b.quotas[tenant].used = b.quotas[tenant].used + slots end
end
