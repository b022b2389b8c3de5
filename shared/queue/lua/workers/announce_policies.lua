-- RUNS when Redis is full
-- Note the policies of a running process, and choose those that apply: what a process sets goes before defaults, and then what
-- the process that started last has. A row counts for `live_ms`, without times in which no process announced, as in an outage.
-- args     source, uptime_ms, live_ms, kept_ms
--          `source`: JSON of its `role`, of what it has `set` and of its `defaults`, by setting
-- Returns  settings and values that apply, and the sources of all running processes
local now, live = clock_ms(), args.live_ms
local own, started, seen, last = args.source, {}, {}, nil
local rows = redis.call('HGETALL', key.policy_sources)
for at = 1, #rows, 2 do
  local start, time = string.match(rows[at + 1], '^(%d+) (%d+)')
  started[rows[at]], seen[rows[at]] = tonumber(start), tonumber(time)
  last = math.max(last or 0, tonumber(time))
end
local pause = last and now - last > live / 2 and now - last or 0
started[own], seen[own] = math.max(started[own] or 0, now - args.uptime_ms), now

local sources, texts = {}, {}
for text, time in pairs(seen) do
  if text ~= own then time = time + pause end
  if time < now - live then redis.call('HDEL', key.policy_sources, text)
  else
    if text == own or pause > 0 then
      redis.call('HSET', key.policy_sources, text, whole(started[text]) .. ' ' .. whole(time))
    end
    table.insert(sources, {text = text, start = started[text], values = cjson.decode(text)})
  end
end
redis.call('PEXPIRE', key.policy_sources, args.kept_ms)
table.sort(sources, function(a, b)
  if a.start ~= b.start then return a.start < b.start end
  return a.text < b.text
end)

local policies, used = {}, {}
for _, kind in ipairs({'defaults', 'set'}) do
  for _, source in ipairs(sources) do
    for name, value in pairs(source.values[kind] or {}) do policies[name] = value end
  end
end
for name, value in pairs(policies) do
  if redis.call('HGET', key.policies, name) ~= value then redis.call('HSET', key.policies, name, value) end
  table.insert(used, name)
  table.insert(used, value)
end
for at, source in ipairs(sources) do texts[at] = source.text end
return {used, texts}
