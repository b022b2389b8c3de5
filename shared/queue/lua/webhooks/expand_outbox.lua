-- NEEDS webhooks
-- RUNS when Redis is full
-- Convert outbox entries into deliveries, one per subscribed endpoint and one for the job's own URL, until the work of
-- about WORK deliveries is done: 116 take 2.5 ms. An entry is converted completely, with at most 17 deliveries.
-- ARGV     limit
-- Returns  number of entries
local WORK, ENDPOINT_READ = 100, 0.1
local now, work, done = clock_ms(), 0, 0
local entries = redis.call('XRANGE', key.webhook_outbox, '-', '+', 'COUNT', ARGV[1])
local endpoints = {} -- by tenant

for _, entry in ipairs(entries) do
  if work >= WORK then break end
  local e = {}
  for at = 1, #entry[2], 2 do e[entry[2][at]] = entry[2][at + 1] end
  local kind = string.find(e.state, '.', 1, true) and e.state or 'job.' .. e.state -- a batch's has its prefix
  local function send(endpoint, url)
    work = work + 1
    webhooks.create({id = e.event .. '.' .. endpoint, event = e.event, tenant = e.tenant, endpoint = endpoint, url = url,
      host = webhooks.host_of(url), job = e.job, type = kind, at = whole(stream_ms(e.event))}, now)
  end
  if not endpoints[e.tenant] then
    endpoints[e.tenant] = webhooks.enabled(e.tenant)
    work = work + 1 + ENDPOINT_READ * #endpoints[e.tenant]
  end
  for _, endpoint in ipairs(endpoints[e.tenant]) do
    for _, state in ipairs(endpoint.states) do
      if state == e.state then send(endpoint.id, endpoint.url) end
    end
  end
  if e.url ~= '' then send('job', e.url) end
  redis.call('XDEL', key.webhook_outbox, entry[1])
  done = done + 1
end
if done > 0 and redis.call('XLEN', key.webhook_outbox) == 0 then redis.call('DEL', key.webhook_outbox) end
return done
