-- Part of the scripts that count runs or queue jobs: the device time of tenants in the present day and month (UTC), and its
-- limits. A field of `spent` is a tenant, with its microseconds.

local spending = {}
local DAY_MS = 86400000
local DAYS_TO_1970 = 719468 -- from March 1 of year 0, so that a leap day is the last of its year

-- The first day, since 1970, of a month, counted from March of year 0.
local function first_day(month)
  local year = math.floor(month / 12)
  local leap_days = math.floor(year / 4) - math.floor(year / 100) + math.floor(year / 400)
  return 365 * year + leap_days + math.floor((153 * (month % 12) + 2) / 5) - DAYS_TO_1970
end

local function month_of(day)
  local month = math.floor((day + DAYS_TO_1970) / 30.436875)
  if first_day(month) > day then month = month - 1 end
  if first_day(month + 1) <= day then month = month + 1 end
  return month
end

-- The present periods: the name of their limit, their hash and their end (ms).
local function periods(now)
  local day = math.floor(now / DAY_MS)
  local month = month_of(day)
  return {
    {limit = 'device_seconds_per_day', hash = key.spent('day', whole(day)), ends = (day + 1) * DAY_MS},
    {limit = 'device_seconds_per_month', hash = key.spent('month', whole(month)), ends = first_day(month + 1) * DAY_MS},
  }
end

function spending.add(tenant, microseconds, now)
  if microseconds <= 0 then return end
  for _, period in ipairs(periods(now)) do
    redis.call('HINCRBY', period.hash, tenant, whole(microseconds))
    redis.call('PEXPIREAT', period.hash, whole(period.ends + DAY_MS))
  end
end

-- The limit that a tenant has used up, and when it resets (ms); nil if none. The later one of two.
function spending.used_up(tenant, now)
  local most = {conf.max_device_seconds_per_day, conf.max_device_seconds_per_month}
  local name, resets
  for at, period in ipairs(periods(now)) do
    local limit = tonumber(redis.call('HGET', key.tenant_limits, tenant .. '|' .. period.limit) or nil) or most[at]
    if limit > 0 and (tonumber(redis.call('HGET', period.hash, tenant) or nil) or 0) >= limit * 1e6 then
      name, resets = period.limit, period.ends
    end
  end
  return name, resets
end
