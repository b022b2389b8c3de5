-- How long until something of these models may be started.
-- KEYS[1]  prefix
-- ARGV     the models
-- Returns  ms, 0 when something is ripe, nil when nothing waits
local first = nil
for _, model in ipairs(ARGV) do
  for rank = 0, 2 do
    local row = redis.call('ZRANGE', key.ripe(model, rank), 0, 0, 'WITHSCORES')
    if row[2] and (not first or tonumber(row[2]) < first) then first = tonumber(row[2]) end
  end
end
if not first then return nil end
return math.max(0, first - clock_ms())
