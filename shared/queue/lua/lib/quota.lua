-- Part of claim and join: how many slots a tenant may have in use at once.

local quota = {}
local PUT_OFF_MS = 2000
local HELD_MS = 60000

-- Read what tenants may and what they use, where the batch does not know it yet.
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

-- Whether a tenant may have `slots` more. A job that needs more than its tenant may ever have starts while nothing else of
-- it runs: else it would wait for ever.
function quota.allows(b, tenant, slots)
  quota.learn(b, {tenant})
  local own = b.quotas[tenant]
  if not own or own.used <= 0 or own.used + slots <= own.most then return true end
  b.short[tenant] = true
  return false
end

function quota.bound(b, tenant) return b.quotas[tenant] and true or false end

function quota.take(b, tenant, slots)
  if b.quotas[tenant] then b.quotas[tenant].used = b.quotas[tenant].used + slots end
end

-- Where slots were left over and all that waits is of tenants that have theirs: the signature becomes ready when these come free,
-- or after a while, and does not stand before others until then.
function quota.put_off(b)
  if b.left <= 0 or b.held or b.more or not next(b.short) then return end
  local model = redis.call('HGET', key.signature(b.sig), 'model')
  if not model then return end
  for rank = 0, b.lowest do
    redis.call('ZADD', key.ready(model, rank), 'XX', 'GT', whole(b.now + PUT_OFF_MS), b.sig)
  end
  for tenant in pairs(b.short) do
    redis.call('SADD', key.deferred(tenant), b.sig)
    redis.call('PEXPIRE', key.deferred(tenant), HELD_MS)
  end
end
