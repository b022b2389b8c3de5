-- How long until something of these models may be started.
-- KEYS[1]  prefix
-- ARGV     lowest rank that counts, then the models
-- Returns  ms, 0 when something is ripe, nil when nothing waits
local first = nil
for at = 2, #ARGV do
  for rank = 0, tonumber(ARGV[1]) do
    local row = redis.call('ZRANGE', key.ripe(ARGV[at], rank), 0, 0, 'WITHSCORES')
    if row[2] and (not first or tonumber(row[2]) < first) then first = tonumber(row[2]) end
  end
end
if not first then return nil end
return math.max(0, first - clock_ms())
