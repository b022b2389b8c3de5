-- RUNS when Redis is full
-- Publish the progress of jobs whose epoch is current in one message: each message wakes every subscribed process.
-- ARGV     reports...
--          `reports`: job id, epoch, 1 to store it in the job's record, phase, step and total of each
-- Returns  how many are current
local rows = {}
for i = 1, #ARGV, 6 do
  local name = key.job(ARGV[i])
  local job = redis.call('HMGET', name, 'state', 'epoch')
  if job[1] == 'running' and job[2] == ARGV[i + 1] then
    local phase, step, total = ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
    if ARGV[i + 2] == '1' then redis.call('HSET', name, 'phase', phase, 'step', step, 'total', total) end
    table.insert(rows, {job = ARGV[i], phase = phase, step = tonumber(step), total = tonumber(total)})
  end
end
if rows[1] then redis.call('PUBLISH', key.progress, cjson.encode(rows)) end
return #rows
