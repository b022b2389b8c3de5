-- NEEDS model_loads pauses
-- How long until jobs of these models are ready for a worker. Paused jobs are not, nor those of tenants at their quota.
-- ARGV     worker, lowest_rank, models...
--          `models`: as in claim
-- Returns  ms, 0 when jobs are ready, nil when none is queued that can be claimed
local worker, now = ARGV[1], clock_ms()
local first = nil
for _, model in ipairs(pauses.without(model_loads.models(3))) do
  for rank = 0, tonumber(ARGV[2]) do
    if redis.call('EXISTS', key.tenant_order(model.name, rank)) == 1 then
      local found = redis.call('ZRANGE', key.ready(model.name, rank), 0, 0, 'WITHSCORES')
      local rows = found[1] and {{sig = found[1], ready = tonumber(found[2])}} or {}
      for _, row in ipairs(model_loads.place(rows, worker, model, rank, now)) do
        first = math.min(first or math.huge, row.free)
      end
    end
  end
end
if not first then return nil end
return math.max(0, first - now)
