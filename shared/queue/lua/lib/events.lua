-- Part of the scripts that change the state of jobs: events of the state, and the outbox of webhooks.

local events = {}
local subscriptions = {} -- by tenant, the states that its endpoints want, as one text

-- Add an event to the outbox if an endpoint of the tenant wants its state, or for the `url` of the job's own webhook.
function events.add_to_outbox(event, id, tenant, state, url)
  local wanted = subscriptions[tenant]
  if not wanted then
    wanted = redis.call('HGET', key.webhook_endpoints(tenant), '*') or ''
    subscriptions[tenant] = wanted
  end
  if url or string.find(wanted, '|' .. state .. '|', 1, true) then
    redis.call('XADD', key.webhook_outbox(tenant), 'MAXLEN', '~', 100000, '*', 'event', event, 'job', id, 'state', state,
      'url', url or '')
    redis.call('ZADD', key.outbox_tenants, 'NX', whole(stream_ms(event)), tenant)
  end
end

-- Publish a state change; returns the event id. `hook` is '|state|state| url' of the job's own webhook.
function events.publish(id, tenant, state, hook)
  local event = redis.call('XADD', key.events, 'MAXLEN', '~', 100000, '*', 'job', id, 'tenant', tenant, 'state', state)
  local states, url = string.match(hook or '', '^(%S+) (%S+)$')
  if not (states and string.find(states, '|' .. state .. '|', 1, true)) then url = nil end
  events.add_to_outbox(event, id, tenant, state, url)
  return event
end
