-- Part of reclaim: a time without renewals is followed by one in which holders renew. A pure function.

local grace = {}
local LONGEST_MS = 10000 -- two command timeouts: how long a worker can take to notice that Redis is back

-- Leases that ended before `before` can be reclaimed; `gap` is when the last gap ended (ms, nil for none). s.now; s.last: the
-- last call of reclaim, which each worker makes eight times in a lease; s.gap; s.lease. Calls can be rare because no worker
-- is alive: a lease that had ended by one gap, whose grace is over, is reclaimed at the end of the next.
function grace.decide(s)
  local gap = s.gap and s.gap <= s.now and s.gap or nil -- later than now: the clock was set back
  local over = not gap or s.now - gap >= math.min(s.lease, LONGEST_MS)
  if s.last and s.now - s.last > s.lease / 2 then return {before = gap and over and gap or 0, gap = s.now} end
  return {before = over and s.now or 0, gap = gap}
end
