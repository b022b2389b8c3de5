-- NEEDS queue recount
-- RUNS when Redis is full
-- Repair counters of tenants, with '*' for all tenants: of queued jobs, of running slots, or of what they keep.
-- ARGV     token, kind, counts...
--          `kind`: queued, running or a number of `footprint`; `counts`: tenant and its counted amount, of each
-- Returns  how many counters were wrong
local token, kind, wrong = ARGV[1], ARGV[2], 0
local names = {queued = key.queued_jobs, running = key.running_slots}
for at = 3, #ARGV, 2 do
  local tenant = ARGV[at]
  local name, field = names[kind] or key.footprint, names[kind] and tenant or (tenant .. '|' .. kind)
  local changes = recount.changes(token, kind .. '|' .. tenant)
  local known = tonumber(redis.call('HGET', name, field) or nil) or 0
  local missing = changes and recount.certain(known, tonumber(ARGV[at + 1]), changes) or 0
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
