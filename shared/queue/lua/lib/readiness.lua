-- When the queued jobs of a signature can start a batch. Pure functions; bench/simulator/learned.py runs this file too.

local readiness = {}
-- A time later than this from now was written before Redis' clock was set back. Times of one script differ by less.
local AHEAD_MS = 1000

-- The expected gap between arrivals, from the previous estimate and the time since the last arrival; nil if unknown: after
-- a first arrival, a long silence, or when the clock was set back.
function readiness.next_gap(gap, since, window)
  if not since or since > 10 * window or since < -AHEAD_MS then return nil end
  if not gap then return since end
  return gap + 0.3 * (since - gap)
end

-- When the queued jobs of one signature and priority are ready (ms). s.oldest: arrival of the oldest; s.returned: since when
-- one of them is a returned job (released, skipped or lost), or nil; s.slots: queued in all priorities; s.efficient_rows:
-- slots that are ready at once; s.window: ms to wait for batch mates; s.gap: from next_gap; s.start_by: by when one of them
-- must start, or nil. After the clock was set back, jobs that arrived before are ready now.
function readiness.ready_at(s)
  local at = math.huge
  if s.oldest then
    at = s.oldest + s.window
    if not s.gap or s.gap > s.window then at = s.oldest end
  end
  if s.slots >= s.efficient_rows or (s.oldest and s.oldest > s.now + AHEAD_MS) then at = math.min(at, s.now) end
  if s.returned then at = math.min(at, s.returned, s.now) end
  if s.start_by then at = math.min(at, s.start_by) end
  return at
end
