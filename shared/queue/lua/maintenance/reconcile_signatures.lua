-- NEEDS job_state
-- Put right the counters of signatures: what waits is what stands in line.
-- KEYS[1]  prefix
-- ARGV     signatures...
-- Returns  how many counters were put right
local now, repaired = clock_ms(), 0
for _, sig in ipairs(ARGV) do
  repaired = repaired + queue.recount(sig)
  queue.refresh(sig, now)
end
return repaired
