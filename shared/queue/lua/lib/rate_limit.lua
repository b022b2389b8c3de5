-- Part of admit: how often a tenant may ask, as a generic cell rate.

local rate_limit = {}
rate_limit.SPAN_MS = 60000

-- One request more, where `limit` are allowed a minute. spent: until when the requests so far use the limit up (ms), or nil.
-- All of the limit may come at once; it grows back evenly. Returns {spent: as before, nil when refused; remaining;
-- reset: ms until all of it is free again; retry: ms until a refused one would be allowed}.
function rate_limit.admit(spent, now, limit)
  local each = rate_limit.SPAN_MS / limit
  local from = math.max(spent or now, now)
  local ahead = from + each - now
  -- A clock in ms since the epoch leaves a double a quarter of a microsecond: half a millisecond is no request.
  if ahead > rate_limit.SPAN_MS + 0.5 then
    return {spent = nil, remaining = 0, reset = math.ceil(from - now), retry = math.max(1, math.ceil(ahead - rate_limit.SPAN_MS))}
  end
  local remaining = math.max(0, math.floor((rate_limit.SPAN_MS - ahead) / each + 0.001))
  return {spent = from + each, remaining = remaining, reset = math.ceil(ahead), retry = 0}
end
