-- NEEDS queue
-- Queued and running jobs by signature.
-- ARGV     signatures...
-- Returns  for each {signature, model, queued jobs and slots by rank (6 numbers), running jobs, oldest age ms | -1,
--          mean ms between completions | -1}
local now, out = clock_ms(), {}
local function number(value) return math.max(0, tonumber(value or 0) or 0) end
for _, sig in ipairs(ARGV) do
  local s = redis.call('HMGET', key.signature(sig), 'model', 'jobs:0', 'slots:0', 'jobs:1', 'slots:1', 'jobs:2', 'slots:2', 'running')
  local oldest = nil
  for rank = 0, 2 do
    if number(s[2 + 2 * rank]) > 0 then
      local head = redis.call('ZRANGE', key.lanes(sig, rank), 0, 0, 'WITHSCORES')
      local since = head[2] and tonumber(head[2]) or nil
      for _, name in ipairs({key.front(sig), key.solo(sig)}) do
        local id = queue.first(name, rank)
        local arrived = id and tonumber(redis.call('HGET', key.job(id), 'arrived') or nil)
        if arrived and (not since or arrived < since) then since = arrived end
      end
      if since and (not oldest or since < oldest) then oldest = since end
    end
  end
  local gap = redis.call('HGET', key.arrivals(sig), 'done_gap')
  table.insert(out, {sig, s[1] or '', number(s[2]), number(s[3]), number(s[4]), number(s[5]), number(s[6]), number(s[7]),
    number(s[8]), oldest and math.max(0, math.floor(now - oldest)) or -1, gap and math.ceil(tonumber(gap)) or -1})
end
return out
