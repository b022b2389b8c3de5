-- NEEDS fill last_claim
-- RUNS when Redis is full
-- Start a batch: choose one ready signature and claim up to `slots` of its slots.
-- ARGV     worker, token, slots, lowest_rank, has_other_jobs, preempted, models...
--          `token`: the same as before when a worker repeats its last request
--          `preempted`: tenants with jobs on this worker that would be preempted, separated by spaces
--          `models`: each with the ms that loading it takes: 0 if in memory, negative if its last load failed
-- Returns  for each claim {job id, wire form, signature, epoch, 1 if solo, ms queued, ms to its deadline | -1,
--          ms to its latest start | -1}
local TRIES = 16
local worker, token, lowest, now = ARGV[1], ARGV[2], tonumber(ARGV[4]), clock_ms()
local request = choice.new(worker, model_loads.models(7), lowest, ARGV[6], now)
local steps = choice.steps(request)
local tried, tries = {}, 0

-- Claim the row's signature. Returns the claims, nil if it gave nothing.
local function try_claim(row)
  tried[row.sig], tries = true, tries + 1
  local batch = {sig = row.sig, model = row.model.name, left = tonumber(ARGV[3]), starting = true,
    has_other_jobs = ARGV[5] == '1', steps = {}}
  for _, step in ipairs(steps) do if choice.has_model(step, batch.model) then table.insert(batch.steps, step) end end
  local claims = fill.fill(batch, request)
  last_claim.keep(worker, token, claims)
  if claims[1] and not row.model.failed then model_loads.hold(row.model.name, worker, now) end
  -- Held: slots of this worker will become free for a large job of that signature.
  if claims[1] or batch.held then return claims end
  -- Its next job needs more slots than its quota leaves.
  if row.tenant and request.short[row.tenant] then tenants.defer(row.tenant, row.model.name, row.rank) end
end

local repeated = last_claim.repeated(worker, token)
if repeated then return repeated end
for _, step in ipairs(steps) do
  for _, rows in ipairs({'by_tenant', 'by_readiness'}) do
    local found = choice[rows](request, step)
    for _, row in ipairs(found) do
      if tries >= TRIES then return {} end
      local claims = not tried[row.sig] and try_claim(row)
      if claims and claims[1] then choice.note_overtaken(row, found, now) end
      if claims then return claims end
      if rows == 'by_readiness' then choice.skip_row(request, row) end
    end
  end
end
return {}
