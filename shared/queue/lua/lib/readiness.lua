-- When the queued jobs of a signature may start a batch. Pure functions; bench/simulate.py runs this file too.

local readiness = {}

-- The expected gap between arrivals of a signature, given the one expected so far and the time since the last arrival.
-- nil: nothing is known (a first arrival), or a long silence made what was known stale.
function readiness.next_gap(gap, since, window)
  if not since or since > 10 * window then return nil end
  if not gap then return since end
  return gap + 0.3 * (since - gap)
end

-- When the waiting jobs of one signature and priority may start a batch (ms).
-- s.now; s.oldest: arrival of the oldest; s.returned: since when one was given back, or nil; s.slots: waiting in all
-- priorities; s.efficient_rows: slots that pay at once; s.window: ms a job may wait for company; s.gap: as next_gap tells it.
function readiness.ready_at(s)
  local at = math.huge
  if s.oldest then
    at = s.oldest + s.window
    if not s.gap or s.gap > s.window then at = s.oldest end
  end
  if s.slots >= s.efficient_rows then at = math.min(at, s.now) end
  if s.returned then at = math.min(at, s.returned) end
  return at
end
