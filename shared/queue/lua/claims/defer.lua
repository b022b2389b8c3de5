-- NEEDS tenants
-- RUNS when Redis is full
-- Remove tenants from the orders of a model and rank, until slots of theirs become free. Those that have free slots again stay.
-- args     blocked...
--          `blocked`: rows of `Blocked` in `shared/queue/order/signatures.py`; the next free slots are kept for its `job_id`
-- Returns  nothing
local limits = {}
for _, one in ipairs(args.blocked) do
  if one.job_id ~= '' then tenants.reserve(one.tenant, one.job_id, one.rank, one.slots) end
  if not quota.allows(limits, one.tenant, one.slots) then tenants.defer(one.tenant, one.model, one.rank) end
end
