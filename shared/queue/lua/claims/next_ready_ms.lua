-- NEEDS model_loads
-- How long until jobs of these models are ready for a worker.
-- ARGV     worker, lowest_rank, models...
--          `models`: as in claim
-- Returns  ms, 0 when jobs are ready, nil when none is queued
local worker, now = ARGV[1], clock_ms()
local first = nil
for _, model in ipairs(model_loads.models(3)) do
  for rank = 0, tonumber(ARGV[2]) do
    for _, row in ipairs(model_loads.candidates(worker, model, rank, '+inf', 1, now)) do
      if not first or row.free < first then first = row.free end
    end
  end
end
if not first then return nil end
return math.max(0, first - now)
