-- NEEDS fill last_claim model_loads
-- RUNS when Redis is full
-- Start a batch: choose one ready signature and claim up to `slots` of its slots.
-- ARGV     worker, token, slots, lowest_rank, has_other_jobs, models...
--          `token`: the same as before when a worker repeats its last request
--          `models`: each with the ms that loading it takes: 0 if in memory, negative if its last load failed
-- Returns  for each claim {job id, wire form, signature, epoch, 1 if solo, ms queued, ms to its deadline | -1}
local worker, token, slots, lowest = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local models = model_loads.models(6)
local now = clock_ms()
local TRIES, EACH = 16, 4

-- Ready signatures by priority, then by turn: models to be loaded come later, and models that other workers hold are left
-- to them for a while.
local function candidates()
  local order, seen = {}, {}
  for rank = 0, lowest do
    local ready = {}
    for _, model in ipairs(models) do
      for _, row in ipairs(model_loads.candidates(worker, model, rank, whole(now), EACH, now)) do
        row.model = model
        if row.free <= now then table.insert(ready, row) end
      end
    end
    table.sort(ready, function(a, b)
      if a.turn ~= b.turn then return a.turn < b.turn end
      return a.sig < b.sig
    end)
    for _, one in ipairs(ready) do
      if not seen[one.sig] then
        seen[one.sig] = true
        table.insert(order, one)
      end
    end
  end
  return order
end

local repeated = last_claim.repeated(worker, token)
if repeated then return repeated end
for try, one in ipairs(candidates()) do
  if try > TRIES then break end
  local b = {sig = one.sig, worker = worker, left = slots, lowest = lowest, now = now, starting = true,
    has_other_jobs = ARGV[5] == '1'}
  local claims = fill.fill(b)
  last_claim.keep(worker, token, claims)
  if claims[1] and not one.model.failed then model_loads.hold(one.model.name, worker, now) end
  -- Held: slots of this worker will become free for a large job of that signature.
  if claims[1] or b.held then return claims end
end
return {}
