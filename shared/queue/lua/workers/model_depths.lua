-- Queued and running jobs of signatures, summed by model.
-- args     signatures...
-- Returns  for each model {model, queued jobs and slots by rank (6 numbers), running jobs, signatures}
local FIELDS = {'jobs:0', 'slots:0', 'jobs:1', 'slots:1', 'jobs:2', 'slots:2', 'running'}
local sums, out = {}, {}
for _, sig in ipairs(args.signatures) do
  local state = redis.call('HMGET', key.signature(sig), 'model', unpack(FIELDS))
  local model = state[1]
  if model then
    if not sums[model] then
      sums[model] = {model, 0, 0, 0, 0, 0, 0, 0, 0}
      table.insert(out, sums[model])
    end
    local sum = sums[model]
    for at = 1, #FIELDS do sum[at + 1] = sum[at + 1] + math.max(0, tonumber(state[at + 1] or 0) or 0) end
    sum[9] = sum[9] + 1
  end
end
return out
