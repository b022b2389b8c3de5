-- NEEDS place
-- Read what decides the position of a queued job and when it is expected to end: of one that waits for others, also of these
-- as far as they have not ended, and of those that these wait for, the nearest first and a bounded number in all.
-- args     job_id
-- Returns  JSON of a list of `UnfinishedJob` in `shared/queue/order/facts.py`; a parent that is not in it is too far
local MOST = 65
local ids, seen, rows, at = {args.job_id}, {[args.job_id] = true}, {}, 1
while ids[at] do
  rows[at] = place.row(ids[at])
  for parent in string.gmatch(rows[at].parents, '%S+') do
    if not seen[parent] and #ids < MOST then
      seen[parent] = true
      table.insert(ids, parent)
    end
  end
  at = at + 1
end
return cjson.encode(rows)
