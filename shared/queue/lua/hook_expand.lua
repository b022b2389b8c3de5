-- NEEDS hooks
-- Turn entries of the outbox into deliveries, one for each endpoint that wants the event, and one for the job's own URL.
-- KEYS[1]  prefix
-- ARGV     most entries
-- Returns  how many entries there were
local now = clock_ms()
local entries = redis.call('XRANGE', key.outbox, '-', '+', 'COUNT', ARGV[1])
local endpoints = {}

local function of_tenant(tenant)
  if endpoints[tenant] then return endpoints[tenant] end
  local found, fields = {}, redis.call('HGETALL', key.hooks(tenant))
  for at = 1, #fields, 2 do
    if string.sub(fields[at], 1, 3) == 'we_' then
      local endpoint = cjson.decode(fields[at + 1])
      endpoint.id = fields[at]
      if endpoint.enabled then table.insert(found, endpoint) end
    end
  end
  endpoints[tenant] = found
  return found
end

local function wants(endpoint, state)
  for _, wanted in ipairs(endpoint.states) do
    if wanted == state then return true end
  end
  return false
end

for _, entry in ipairs(entries) do
  local e = {}
  for at = 1, #entry[2], 2 do e[entry[2][at]] = entry[2][at + 1] end
  local told = string.find(e.state, '.', 1, true) and e.state or 'job.' .. e.state -- a batch's names itself
  local function send(endpoint, url)
    hooks.deliver({id = e.event .. '.' .. endpoint, event = e.event, tenant = e.tenant, endpoint = endpoint, url = url,
      host = hooks.host_of(url), job = e.job, type = told, at = whole(stream_ms(e.event))}, now)
  end
  for _, endpoint in ipairs(of_tenant(e.tenant)) do
    if wants(endpoint, e.state) then send(endpoint.id, endpoint.url) end
  end
  if e.url ~= '' then send('job', e.url) end
  redis.call('XDEL', key.outbox, entry[1])
end
if #entries > 0 and redis.call('XLEN', key.outbox) == 0 then redis.call('DEL', key.outbox) end
return #entries
