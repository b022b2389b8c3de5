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

-- The noted changes of a counter, or nil if the recount `token` is not in progress.
function recount.changes(token, counter)
  local noted = redis.call('HMGET', key.recount, 'token', counter)
  if noted[1] ~= token then return nil end
  return tonumber(noted[2] or nil) or 0
end

-- By how much a counter is certainly wrong.
function recount.certain(counter, counted, changes)
  local difference = counted - counter
  if difference > 0 then return math.max(0, difference - changes) end
  return math.min(0, difference + changes)
end
