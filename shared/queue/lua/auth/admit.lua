-- NEEDS rate_limit
-- RUNS when Redis is full
-- Count a request of a tenant, if its limit allows it.
-- args     tenant, requests_per_minute
-- Returns  {1 if admitted, remaining, ms until the full limit is available, ms to wait when refused}
local name, now = key.request_rate(args.tenant), clock_ms()
local outcome = rate_limit.admit(tonumber(redis.call('GET', name) or nil), now, args.requests_per_minute)
if outcome.spent then
  redis.call('SET', name, string.format('%.3f', outcome.spent), 'PX', math.max(1, math.ceil(outcome.reset)))
end
return {outcome.spent and 1 or 0, outcome.remaining, outcome.reset, outcome.retry}, not outcome.spent
