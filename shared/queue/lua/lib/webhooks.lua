-- Shared part of the webhook scripts.

local webhooks = {}
local DELIVERY_MS = 7 * 86400000
local LOG_CAP = 10000

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

-- Store the states to which a tenant's enabled endpoints subscribe; job_state.event reads them.
function webhooks.refresh(tenant)
  local name, subscribed = key.webhook_endpoints(tenant), {}
  for _, endpoint in ipairs(webhooks.enabled(tenant)) do
    for _, state in ipairs(endpoint.states) do subscribed[state] = true end
  end
  local states = ''
  for state in pairs(subscribed) do states = states .. '|' .. state end
  if states == '' then redis.call('HDEL', name, '*') else redis.call('HSET', name, '*', states .. '|') end
end

-- Create a delivery that is due now, unless it exists.
function webhooks.create(d, now)
  local name = key.webhook_delivery(d.id)
  if redis.call('EXISTS', name) == 1 then return end
  redis.call('HSET', name, 'event_id', d.event, 'tenant', d.tenant, 'endpoint', d.endpoint, 'url', d.url, 'host', d.host,
    'job_id', d.job, 'type', d.type, 'at_ms', d.at, 'state', 'pending', 'attempts', 0)
  redis.call('PEXPIRE', name, DELIVERY_MS)
  local log = key.webhook_deliveries(d.tenant)
  redis.call('ZADD', log, whole(now), d.id)
  redis.call('ZREMRANGEBYRANK', log, 0, -LOG_CAP - 1)
  redis.call('PEXPIRE', log, DELIVERY_MS)
  webhooks.due(d.id, d.host, now)
end

-- Make a delivery and its host due at a time.
function webhooks.due(id, host, at)
  redis.call('ZADD', key.webhook_due(host), whole(at), id)
  webhooks.refresh_host(host)
end

function webhooks.refresh_host(host)
  local first = redis.call('ZRANGE', key.webhook_due(host), 0, 0, 'WITHSCORES')
  if first[2] then redis.call('ZADD', key.webhook_hosts, first[2], host) else redis.call('ZREM', key.webhook_hosts, host) end
end

function webhooks.host_of(url) return string.match(url, '^%a+://([^/?#]+)') or url end
