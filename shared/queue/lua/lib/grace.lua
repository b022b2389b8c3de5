-- Part of reclaim: a time without renewals is followed by one in which holders renew. A pure function.

local grace = {}
local LONGEST_MS = 10000 -- two command timeouts: how long a worker can take to notice that Redis is back
local CHORES_MS = 15000 -- the chores call at least this often
local CHORES_ALONE = 3 -- calls of the chores with none of a worker between them, after which there is no worker

-- Leases that ended before `before` can be reclaimed; `gap` is when the last gap ended (ms, nil for none), `gaps` how many
-- calls in a row were gaps. s.now; s.last: the last call of reclaim, which each worker makes eight times in a lease, and the
-- chores every 10 s; s.gap; s.gaps; s.lease. A call that ends a gap reclaims nothing, whatever came before it: of two outages
-- with a moment between them, that moment was too short to renew. With leases of less than 20 s each call of the chores is a
-- gap while no worker is there: some of them in a row are no outages.
function grace.decide(s)
  local gap = s.gap and s.gap <= s.now and s.gap or nil -- later than now: the clock was set back
  if s.last and s.now - s.last > s.lease / 2 then
    local gaps = s.now - s.last <= CHORES_MS and (s.gaps or 0) + 1 or 1
    return {before = gaps >= CHORES_ALONE and s.now or 0, gap = s.now, gaps = gaps}
  end
  local over = not gap or s.now - gap >= math.min(s.lease, LONGEST_MS)
  return {before = over and s.now or 0, gap = gap, gaps = 0}
end
