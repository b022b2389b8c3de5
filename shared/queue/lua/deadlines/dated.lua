-- Part of the scripts that queue jobs or remove them: queued jobs with a deadline are not in their lane's stream but in
-- dated:<sig> and returned:<lane>, by latest start. In their lane they go before the stream: least slack first.

local dated = {}
local SPAN = 4398046511104 -- of a priority, or of a kind of returned job
local PLACED_FIRST = 10000000000000
local OLDEST_READ = 4
local LEAD_MS = 1000 -- of a start before the latest one

-- When the dated jobs of a signature and priority make it ready: arrival of about the oldest, and the least latest start
-- with a lead; nil without any.
function dated.facts(sig, rank)
  local rows, oldest = redis.call('ZRANGEBYSCORE', key.dated(sig), whole(rank * SPAN), '(' .. whole((rank + 1) * SPAN),
    'WITHSCORES', 'LIMIT', 0, OLDEST_READ), math.huge
  for at = 1, #rows, 2 do
    oldest = math.min(oldest, tonumber(redis.call('HGET', key.job(rows[at]), 'arrived') or nil) or 0)
  end
  if rows[1] then return {oldest = oldest, start_by = tonumber(rows[2]) - rank * SPAN - LEAD_MS} end
end

-- The first dated job of a lane, and its latest start; nil without one.
function dated.first_of_lane(lane)
  local row = redis.call('ZRANGEBYSCORE', key.returned(lane.sig, lane.rank, lane.tenant), whole(SPAN), '(' .. whole(2 * SPAN),
    'WITHSCORES', 'LIMIT', 0, 1)
  if row[1] then return row[1], tonumber(row[2]) - SPAN end
end

-- The score of a lane among its tenant's signatures: lanes with dated jobs go first, by the least slack.
function dated.placed(start_by) return start_by - PLACED_FIRST end

-- Whether a lane with this score has dated jobs, and whether the first of them is late.
function dated.has_any(score) return score < 0 end
function dated.has_late(score, now) return score + PLACED_FIRST <= now end

-- The least latest start of a lane with this score; nil without dated jobs that are not late. lane: sig, rank, tenant.
function dated.start_by_of(score, lane, now)
  if not dated.has_any(score) then return nil end
  if not dated.has_late(score, now) then return score + PLACED_FIRST end
  local row = redis.call('ZRANGEBYSCORE', key.returned(lane.sig, lane.rank, lane.tenant), '(' .. whole(SPAN + now),
    '(' .. whole(2 * SPAN), 'WITHSCORES', 'LIMIT', 0, 1)
  return row[1] and tonumber(row[2]) - SPAN or nil
end
