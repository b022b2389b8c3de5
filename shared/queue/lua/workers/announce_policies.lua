-- RUNS when Redis is full
-- Note the policies of a running process, and choose those that apply: what a process sets goes before defaults, and then what the
-- process that started last has.
-- ARGV     source, starts, live_ms
--          `source`: JSON of its `role`, of what it has `set` and of its `defaults`, by setting
-- Returns  settings and values that apply, and the sources of all running processes
local now, live = clock_ms(), tonumber(ARGV[3])
local started = ARGV[2] ~= '1' and string.match(redis.call('HGET', key.policy_sources, ARGV[1]) or '', '^%d+') or whole(now)
redis.call('HSET', key.policy_sources, ARGV[1], started .. ' ' .. whole(now))
redis.call('PEXPIRE', key.policy_sources, whole(live))

local sources, texts = {}, {}
local rows = redis.call('HGETALL', key.policy_sources)
for at = 1, #rows, 2 do
  local start, seen = string.match(rows[at + 1], '^(%d+) (%d+)$')
  if tonumber(seen) < now - live then redis.call('HDEL', key.policy_sources, rows[at])
  else table.insert(sources, {text = rows[at], start = tonumber(start), values = cjson.decode(rows[at])}) end
end
table.sort(sources, function(a, b)
  if a.start ~= b.start then return a.start < b.start end
  return a.text < b.text
end)

local policies, used = {}, {}
for _, kind in ipairs({'defaults', 'set'}) do
  for _, source in ipairs(sources) do
    for name, value in pairs(source.values[kind]) do policies[name] = value end
  end
end
for name, value in pairs(policies) do
  if redis.call('HGET', key.policies, name) ~= value then redis.call('HSET', key.policies, name, value) end
  table.insert(used, name)
  table.insert(used, value)
end
for at, source in ipairs(sources) do texts[at] = source.text end
return {used, texts}
