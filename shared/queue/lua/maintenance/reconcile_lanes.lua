-- NEEDS job_state
-- RUNS when Redis is full
-- Repair lanes: entries without a job become dead letters, missing groups and index rows are created.
-- ARGV     lanes...
--          `lanes`: 'signature|priority|tenant'
-- Returns  how much was repaired
local READ = 2000
local now, repaired = clock_ms(), 0

local function rank_of(priority)
  for rank = 0, 2 do if RANKS[rank] == priority then return rank end end
end

for _, name in ipairs(ARGV) do
  local sig, priority, tenant = string.match(name, '^(.*)|(%a+)|([^|]*)$')
  local rank = rank_of(priority)
  if rank then
    local lane = key.lane(sig, rank, tenant)
    -- The lane can have been emptied and deleted since the scan.
    if redis.call('EXISTS', lane) == 1 and not redis.pcall('XINFO', 'GROUPS', lane)[1] then
      redis.call('XGROUP', 'CREATE', lane, 'workers', '0')
      repaired = repaired + 1
    end
    for _, row in ipairs(redis.call('XRANGE', lane, '-', '+', 'COUNT', READ)) do
      local id = nil
      for at = 1, #row[2], 2 do if row[2][at] == 'job' then id = row[2][at + 1] end end
      local known = id and redis.call('HMGET', key.job(id), 'state', 'entry') or {}
      if known[2] ~= row[1] then
        queue.acknowledge(lane, row[1])
        if not known[1] then
          job_state.bury(id or (name .. '|' .. row[1]), 'no_record', 'entry without a job: ' .. sig, now)
        end
        repaired = repaired + 1
      end
    end
    local head = queue.head(lane)
    local place = redis.call('ZSCORE', key.lanes(sig, rank), tenant)
    if (head and true or false) ~= (place and true or false) then repaired = repaired + 1 end
    queue.update_lane(sig, rank, tenant, head)
  end
end
return repaired
