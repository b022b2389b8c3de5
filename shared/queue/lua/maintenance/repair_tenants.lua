-- NEEDS queue recount
-- RUNS when Redis is full
-- Repair counters of tenants, with '*' for all tenants: of queued jobs, of running slots, or of what they keep.
-- args     token, kind, counts...
--          `kind`: queued, running or a number of `footprint`
-- Returns  how many counters were wrong
local token, kind, wrong = args.token, args.kind, 0
local names = {queued = key.queued_jobs, running = key.running_slots}
for _, count in ipairs(args.counts) do
  local tenant = count.tenant
  local name, field = names[kind] or key.footprint, names[kind] and tenant or (tenant .. '|' .. kind)
  local changes = recount.changes(token, kind .. '|' .. tenant)
  local known = tonumber(redis.call('HGET', name, field) or nil) or 0
  local missing = changes and recount.certain(known, count.amount, changes) or 0
  if missing ~= 0 then
    wrong = wrong + 1
    if kind == 'running' then
      queue.count_running(tenant, missing)
    elseif redis.call('HINCRBY', name, field, whole(missing)) <= 0 then
      redis.call('HDEL', name, field)
    end
  end
end
return wrong
