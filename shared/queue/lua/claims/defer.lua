-- NEEDS tenants
-- RUNS when Redis is full
-- Remove tenants from the orders of a model and rank, until slots of theirs become free. Those that have free slots again stay.
-- ARGV     blocked...
--          `blocked`: tenant, model, rank, slots that the tenant's limit does not allow, and the overdue job that the next free
--          slots are kept for or '', of each
-- Returns  nothing
local limits = {}
for at = 1, #ARGV, 5 do
  local tenant, model, rank, slots, id = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 4]
  if id ~= '' then tenants.reserve(tenant, id, rank, slots) end
  if not quota.allows(limits, tenant, slots) then tenants.defer(tenant, model, rank) end
end
