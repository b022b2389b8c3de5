-- Part of the scripts that look after webhooks.

local hooks = {}
local DELIVERY_MS = 7 * 86400000
local LOG_CAP = 10000

-- Note which states any endpoint of a tenant that is enabled wants: ending.event asks for no more.
function hooks.refresh(tenant)
  local name, wanted = key.hooks(tenant), {}
  local fields = redis.call('HGETALL', name)
  for at = 1, #fields, 2 do
    if string.sub(fields[at], 1, 3) == 'we_' then
      local endpoint = cjson.decode(fields[at + 1])
      if endpoint.enabled then
        for _, state in ipairs(endpoint.states) do wanted[state] = true end
      end
    end
  end
  local states = ''
  for state in pairs(wanted) do states = states .. '|' .. state end
  if states == '' then redis.call('HDEL', name, '*') else redis.call('HSET', name, '*', states .. '|') end
end

-- Make a delivery that is due now; one that is known stays as it is.
function hooks.deliver(d, now)
  local name = key.delivery(d.id)
  if redis.call('EXISTS', name) == 1 then return end
  redis.call('HSET', name, 'event', d.event, 'tenant', d.tenant, 'endpoint', d.endpoint, 'url', d.url, 'host', d.host,
    'job', d.job, 'type', d.type, 'at', d.at, 'state', 'pending', 'attempts', 0)
  redis.call('PEXPIRE', name, DELIVERY_MS)
  local log = key.deliveries(d.tenant)
  redis.call('ZADD', log, whole(now), d.id)
  redis.call('ZREMRANGEBYRANK', log, 0, -LOG_CAP - 1)
  redis.call('PEXPIRE', log, DELIVERY_MS)
  hooks.due(d.id, d.host, now)
end

-- Let a delivery be due at a time, and its host with it.
function hooks.due(id, host, at)
  redis.call('ZADD', key.hook_due(host), whole(at), id)
  hooks.refresh_host(host)
end

function hooks.refresh_host(host)
  local first = redis.call('ZRANGE', key.hook_due(host), 0, 0, 'WITHSCORES')
  if first[2] then redis.call('ZADD', key.hook_hosts, first[2], host) else redis.call('ZREM', key.hook_hosts, host) end
end

function hooks.host_of(url) return string.match(url, '^%a+://([^/?#]+)') or url end
