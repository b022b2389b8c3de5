-- NEEDS webhooks
-- RUNS when Redis is full
-- Claim due deliveries, a few per host; each is due again later in case its sender is killed. Tenants take turns, the one
-- with the fewest in progress first. One takes a slot only while it holds fewer than are free.
-- args     slots, max_per_host, again_ms, in_progress...
--          `slots`: all of the sender
-- Returns  for each {id, fields of the delivery, endpoint or account as JSON | ''}
local now, free, per_host, again = clock_ms(), args.slots, args.max_per_host, args.again_ms
local MAX_TENANTS, MAX_HOSTS = 128, 32 -- more than can have deliveries in progress, so that these hide no others
local by_tenant, by_host, claimed, touched = {}, {}, {}, {}
for _, one in ipairs(args.in_progress) do
  by_tenant[one.tenant] = (by_tenant[one.tenant] or 0) + one.deliveries
  by_host[one.tenant .. '|' .. one.host] = one.deliveries
  free = free - one.deliveries
end

-- The next due delivery of a tenant: id and host.
local function next_due(turn)
  while #turn.ids == 0 do
    turn.host = table.remove(turn.hosts, 1)
    if not turn.host then return nil end
    local room = per_host - (by_host[turn.tenant .. '|' .. turn.host] or 0)
    if room > 0 then
      local due = key.webhook_due(turn.tenant, turn.host)
      turn.ids = redis.call('ZRANGEBYSCORE', due, '-inf', whole(now), 'LIMIT', 0, room)
    end
  end
  return table.remove(turn.ids, 1)
end

local function claim(turn, id)
  local fields, due = redis.call('HGETALL', key.webhook_delivery(id)), key.webhook_due(turn.tenant, turn.host)
  touched[turn.tenant .. '|' .. turn.host] = {turn.tenant, turn.host}
  if #fields == 0 then return redis.call('ZREM', due, id) end
  redis.call('ZADD', due, whole(now + again), id)
  turn.running, free = turn.running + 1, free - 1
  local d = redis.call('HMGET', key.webhook_delivery(id), 'tenant', 'endpoint')
  local field = d[2] == 'job' and 'account' or d[2]
  table.insert(claimed, {id, fields, redis.call('HGET', key.webhook_endpoints(d[1]), field) or ''})
end

local turns = {}
for at, tenant in ipairs(redis.call('ZRANGEBYSCORE', key.webhook_tenants, '-inf', whole(now), 'LIMIT', 0, MAX_TENANTS)) do
  turns[at] = {tenant = tenant, running = by_tenant[tenant] or 0, at = at, ids = {}}
end
table.sort(turns, function(a, b) return a.running < b.running or (a.running == b.running and a.at < b.at) end)
while #turns > 0 do
  local next_turns = {}
  for _, turn in ipairs(turns) do
    if turn.running < free then
      turn.hosts = turn.hosts
        or redis.call('ZRANGEBYSCORE', key.webhook_hosts(turn.tenant), '-inf', whole(now), 'LIMIT', 0, MAX_HOSTS)
      local id = next_due(turn)
      if id then
        claim(turn, id)
        table.insert(next_turns, turn)
      end
    end
  end
  turns = next_turns
end
for _, pair in pairs(touched) do webhooks.refresh_host(pair[1], pair[2]) end
return claimed
