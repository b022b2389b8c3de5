-- NEEDS tenants
-- RUNS when Redis is full
-- Remove tenants from the orders of a model and rank, until slots of theirs become free. Those that have free slots again stay.
-- ARGV     blocked...
--          `blocked`: tenant, model, rank and slots that the tenant's limit does not allow, of each
-- Returns  nothing
local limits = {}
for at = 1, #ARGV, 4 do
  local tenant, model, rank = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  if not quota.allows(limits, tenant, tonumber(ARGV[at + 3])) then tenants.defer(tenant, model, rank) end
end
