-- NEEDS dead_letters queue
-- RUNS when Redis is full
-- Repair lanes, in pages: entries without a job become dead letters, missing index rows are created.
-- args     after, lanes...
--          `after`: the last entry of the first lane that was checked, '' for none; `lanes`: 'signature|priority|tenant'
-- Returns  {how much was repaired, lanes completed, last checked entry of the next lane | ''}
local READ = 500
local now, repaired, done, after, left = clock_ms(), 0, 0, args.after, READ

local function rank_of(priority)
  for rank = 0, 2 do if RANKS[rank] == priority then return rank end end
end

-- Remove an entry that is not its queued job's current one.
local function check_entry(name, sig, lane, row)
  local id = queue.value_of(row, 'job')
  local known = id and redis.call('HMGET', key.job(id), 'state', 'entry') or {}
  if known[2] == row[1] and (known[1] == 'queued' or known[1] == 'running') then return end -- running: of an older version
  queue.remove_entry(lane, row[1])
  if not known[1] then dead_letters.bury(id or (name .. '|' .. row[1]), 'no_record', 'entry without a job: ' .. sig, now) end
  repaired = repaired + 1
end

-- The model of a signature; if the signature is lost, that of its job `id`, with which it is made again.
local function model_of(sig, id)
  local model = redis.call('HGET', key.signature(sig), 'model')
  if not model and id then
    model = redis.call('HGET', key.job(id), 'model')
    if model then redis.call('HSET', key.signature(sig), 'model', model) end
  end
  return model
end

-- Check the next entries of a lane; returns whether it is complete.
local function check_lane(name, sig, rank, tenant)
  local lane = key.lane(sig, rank, tenant)
  local rows = redis.call('XRANGE', lane, after == '' and '-' or '(' .. after, '+', 'COUNT', left)
  for _, row in ipairs(rows) do check_entry(name, sig, lane, row) end
  if #rows == left then
    after = rows[#rows][1]
    return false
  end
  left, after = left - #rows, ''
  local first = redis.call('XRANGE', lane, '-', '+', 'COUNT', 1)[1]
  local head = first and first[1]
  local place = redis.call('ZSCORE', key.lanes(sig, rank), tenant)
  if (head and true or false) ~= (place and true or false) then repaired = repaired + 1 end
  local model = model_of(sig, queue.value_of(first, 'job'))
  if model then
    repaired = repaired + queue.update_lane({model = model, sig = sig, rank = rank, tenant = tenant}, head)
  end
  return true
end

for _, lane in ipairs(args.lanes) do
  local sig, priority, tenant = string.match(lane, '^(.*)|(%a+)|([^|]*)$')
  local rank = rank_of(priority)
  if rank and not check_lane(lane, sig, rank, tenant) then break end
  done = done + 1
end
return {repaired, done, after}
