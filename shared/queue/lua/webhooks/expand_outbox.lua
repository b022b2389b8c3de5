-- NEEDS webhooks
-- RUNS when Redis is full
-- Convert outbox entries into deliveries, one per subscribed endpoint and one for the job's own URL, until the work of
-- about WORK deliveries is done: 116 take 2.5 ms. An entry is converted completely, with at most 17 deliveries. Tenants
-- take turns: one with unconverted entries goes behind the others.
-- args     limit
-- Returns  number of entries
local WORK, ENDPOINT_READ = 100, 0.1
local now, work, done = clock_ms(), 0, 0

local function expand(tenant)
  local outbox, endpoints = key.webhook_outbox(tenant), webhooks.enabled(tenant)
  work = work + 1 + ENDPOINT_READ * #endpoints
  for _, entry in ipairs(redis.call('XRANGE', outbox, '-', '+', 'COUNT', args.limit - done)) do
    if work >= WORK then break end
    local e = {}
    for at = 1, #entry[2], 2 do e[entry[2][at]] = entry[2][at + 1] end
    local kind = string.find(e.state, '.', 1, true) and e.state or 'job.' .. e.state -- a batch's has its prefix
    local function send(endpoint, url)
      work = work + 1
      webhooks.create({id = e.event .. '.' .. endpoint, event = e.event, tenant = tenant, endpoint = endpoint, url = url,
        host = webhooks.host_of(url), job = e.job, type = kind, at = whole(stream_ms(e.event))}, now)
    end
    for _, endpoint in ipairs(endpoints) do
      for _, state in ipairs(endpoint.states) do
        if state == e.state then send(endpoint.id, endpoint.url) end
      end
    end
    if e.url ~= '' then send('job', e.url) end
    redis.call('XDEL', outbox, entry[1])
    done = done + 1
  end
  -- Behind the tenants with a first event of the same millisecond.
  if redis.call('XLEN', outbox) > 0 then return redis.call('ZADD', key.outbox_tenants, whole(now + 1), tenant) end
  redis.call('DEL', outbox)
  redis.call('ZREM', key.outbox_tenants, tenant)
end

for _, tenant in ipairs(redis.call('ZRANGE', key.outbox_tenants, 0, WORK)) do
  if work >= WORK or done >= args.limit then break end
  expand(tenant)
end
return done
