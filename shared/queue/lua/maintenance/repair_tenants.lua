-- NEEDS queue recount
-- RUNS when Redis is full
-- Repair the counters of tenants: of queued jobs, with '*' for all tenants, or of running slots.
-- ARGV     token, kind, counts...
--          `kind`: queued or running; `counts`: tenant and its counted jobs or slots, of each
-- Returns  how many counters were wrong
local token, kind, wrong = ARGV[1], ARGV[2], 0
local name = kind == 'queued' and key.queued_jobs or key.running_slots
for at = 3, #ARGV, 2 do
  local tenant = ARGV[at]
  local changes = recount.changes(token, kind .. '|' .. tenant)
  local known = tonumber(redis.call('HGET', name, tenant) or nil) or 0
  local missing = changes and recount.certain(known, tonumber(ARGV[at + 1]), changes) or 0
  if missing ~= 0 then
    wrong = wrong + 1
    if kind == 'running' then
      queue.count_running(tenant, missing)
    elseif redis.call('HINCRBY', name, tenant, missing) <= 0 then
      redis.call('HDEL', name, tenant)
    end
  end
end
return wrong
