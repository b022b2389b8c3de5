-- Part of the scripts that change counters, and of those that count again. A count takes several scripts. What changes
-- between them can be counted or not, so a difference is certain only beyond the changes that were noted meanwhile.

local recount = {}
local in_progress = nil

function recount.in_progress()
  if in_progress == nil then in_progress = redis.call('EXISTS', key.recount) == 1 end
  return in_progress
end

-- Note a change of a counter by `amount`, while a recount is in progress.
function recount.note(counter, amount) redis.call('HINCRBY', key.recount, counter, math.abs(amount)) end
