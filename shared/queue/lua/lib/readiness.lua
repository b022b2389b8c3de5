-- When the queued jobs of a signature can start a batch. Pure functions; bench/simulate.py runs this file too.

local readiness = {}

-- The expected gap between arrivals, from the previous estimate and the time since the last arrival; nil if unknown: after
-- a first arrival or a long silence.
function readiness.next_gap(gap, since, window)
  if not since or since > 10 * window then return nil end
  if not gap then return since end
  return gap + 0.3 * (since - gap)
end

-- When the queued jobs of one signature and priority are ready (ms). s.oldest: arrival of the oldest; s.returned: since when
-- one was released, or nil; s.slots: queued in all priorities; s.efficient_rows: slots that are ready at once; s.window: ms to
-- wait for batch mates; s.gap: from next_gap.
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
