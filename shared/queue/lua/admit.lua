-- NEEDS rate
-- Count one request of a tenant, where its limit allows it.
-- KEYS[1]  prefix
-- ARGV     tenant, requests a minute
-- Returns  {1 if allowed, remaining, ms until all of the limit is free again, ms to wait when refused}
local name, now = key.rate(ARGV[1]), clock_ms()
local told = rate.admit(tonumber(redis.call('GET', name) or nil), now, tonumber(ARGV[2]))
if told.spent then redis.call('SET', name, string.format('%.3f', told.spent), 'PX', math.max(1, math.ceil(told.reset))) end
return {told.spent and 1 or 0, told.remaining, told.reset, told.retry}
