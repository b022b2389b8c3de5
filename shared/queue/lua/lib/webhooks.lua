-- Shared part of the webhook scripts.

local webhooks = {}
local DELIVERY_MS = 7 * 86400000
local KEPT = 50000 -- deliveries of a tenant: with their keys about 40 MB

-- The enabled endpoints of a tenant.
function webhooks.enabled(tenant)
  local endpoints, fields = {}, redis.call('HGETALL', key.webhook_endpoints(tenant))
  for at = 1, #fields, 2 do
    local endpoint = string.sub(fields[at], 1, 3) == 'we_' and cjson.decode(fields[at + 1])
    if endpoint and endpoint.enabled then
      endpoint.id = fields[at]
      table.insert(endpoints, endpoint)
    end
  end
  return endpoints
end

-- Store the states to which a tenant's enabled endpoints subscribe; events.publish reads them.
function webhooks.refresh(tenant)
  local name, subscribed = key.webhook_endpoints(tenant), {}
  for _, endpoint in ipairs(webhooks.enabled(tenant)) do
    for _, state in ipairs(endpoint.states) do subscribed[state] = true end
  end
  local states = ''
  for state in pairs(subscribed) do states = states .. '|' .. state end
  if states == '' then redis.call('HDEL', name, '*') else redis.call('HSET', name, '*', states .. '|') end
end

-- Create a delivery that is due now, unless it exists. Beyond `KEPT` the tenant's oldest one is dropped, pending or not.
function webhooks.create(d, now)
  local name = key.webhook_delivery(d.id)
  if redis.call('EXISTS', name) == 1 then return end
  redis.call('HSET', name, 'event_id', d.event, 'tenant', d.tenant, 'endpoint', d.endpoint, 'url', d.url, 'host', d.host,
    'job_id', d.job, 'type', d.type, 'at_ms', d.at, 'state', 'pending', 'attempts', 0)
  redis.call('PEXPIRE', name, DELIVERY_MS)
  local log = key.webhook_deliveries(d.tenant)
  redis.call('ZADD', log, whole(now), d.id)
  local excess = redis.call('ZCARD', log) - KEPT
  if excess > 0 then
    for _, id in ipairs(redis.call('ZRANGE', log, 0, math.min(excess, 2) - 1)) do webhooks.drop(id, d.tenant) end
  end
  redis.call('PEXPIRE', log, DELIVERY_MS)
  webhooks.due(d.id, d.tenant, d.host, now)
end

function webhooks.drop(id, tenant)
  local host = redis.call('HGET', key.webhook_delivery(id), 'host')
  if host then
    redis.call('ZREM', key.webhook_due(tenant, host), id)
    webhooks.refresh_host(tenant, host)
  end
  redis.call('DEL', key.webhook_delivery(id))
  redis.call('ZREM', key.webhook_deliveries(tenant), id)
end

-- Make a delivery due at a time.
function webhooks.due(id, tenant, host, at)
  redis.call('ZADD', key.webhook_due(tenant, host), whole(at), id)
  webhooks.refresh_host(tenant, host)
end

local function index_first(index, member, of)
  local first = redis.call('ZRANGE', of, 0, 0, 'WITHSCORES')
  if first[2] then redis.call('ZADD', index, first[2], member) else redis.call('ZREM', index, member) end
end

-- Index a host and its tenant by their earliest delivery.
function webhooks.refresh_host(tenant, host)
  index_first(key.webhook_hosts(tenant), host, key.webhook_due(tenant, host))
  index_first(key.webhook_tenants, tenant, key.webhook_hosts(tenant))
end

function webhooks.host_of(url) return string.match(url, '^%a+://([^/?#]+)') or url end
