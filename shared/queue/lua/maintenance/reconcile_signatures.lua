-- NEEDS job_state
-- RUNS when Redis is full
-- Repair the counters of signatures.
-- ARGV     signatures...
-- Returns  how many counters were wrong
local now, repaired = clock_ms(), 0
for _, sig in ipairs(ARGV) do
  repaired = repaired + queue.recount(sig)
  queue.refresh(sig, now)
end
return repaired
