-- NEEDS queue recount
-- RUNS when Redis is full
-- Repair the counters of queued jobs of signatures, and their readiness.
-- args     token, counts...
--          `counts`: the counted jobs of each, and the changes noted before
-- Returns  how many counters were wrong
local token, now, wrong, touched = args.token, clock_ms(), 0, {}
for _, count in ipairs(args.counts) do
  local sig, rank, counted = count.signature, count.rank, count.jobs
  local name = key.signature(sig)
  local known = redis.call('HMGET', name, 'model', 'jobs:' .. rank, 'slots:' .. rank)
  local changes = recount.changes(token, 'jobs|' .. sig .. '|' .. rank)
  if known[1] and changes then
    local jobs, slots = tonumber(known[2] or nil) or 0, tonumber(known[3] or nil) or 0
    local missing = recount.certain(jobs, counted, math.max(0, changes - count.changes))
    if missing ~= 0 then
      -- Slots by the mean of the old counters: they only decide how soon a batch is full.
      local mean = jobs > 0 and math.max(1, slots / jobs) or 1
      redis.call('HSET', name, 'jobs:' .. rank, whole(jobs + missing), 'slots:' .. rank, whole((jobs + missing) * mean))
      wrong = wrong + 1
    end
    touched[sig] = true
  end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
if wrong > 0 then queue.wake() end
return wrong
