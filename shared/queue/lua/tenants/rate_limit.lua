-- Part of admit: the request rate of a tenant, as a generic cell rate.

local rate_limit = {}
rate_limit.SPAN_MS = 60000

-- Admit one request at `limit` per minute, which can all come at once. spent: when the requests so far are paid off (ms), or
-- nil. Returns {spent: the new value, nil when refused; remaining; reset: ms until the full limit is available; retry: ms
-- until a refused request would be admitted}.
function rate_limit.admit(spent, now, limit)
  local each = rate_limit.SPAN_MS / limit
  -- More than a span ahead, it was written before the clock was set back.
  if spent and spent > now + rate_limit.SPAN_MS + 0.5 then spent = nil end
  local from = math.max(spent or now, now)
  local ahead = from + each - now
  -- A double holds ms since the epoch to a quarter of a microsecond; half a millisecond is below any request.
  if ahead > rate_limit.SPAN_MS + 0.5 then
    local retry = math.max(1, math.ceil(ahead - rate_limit.SPAN_MS))
    return {spent = nil, remaining = 0, reset = math.ceil(from - now), retry = retry}
  end
  local remaining = math.max(0, math.floor((rate_limit.SPAN_MS - ahead) / each + 0.001))
  return {spent = from + each, remaining = remaining, reset = math.ceil(ahead), retry = 0}
end
