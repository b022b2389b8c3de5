-- RUNS when Redis is full
-- Publish progress, and store it in the records of jobs whose epoch is current.
-- ARGV     message, reports...
--          `reports`: job id, epoch, phase, step and total of each to be stored
-- Returns  how many were stored
local written = 0
for i = 2, #ARGV, 5 do
  local name = key.job(ARGV[i])
  local job = redis.call('HMGET', name, 'state', 'epoch')
  if job[1] == 'running' and job[2] == ARGV[i + 1] then
    redis.call('HSET', name, 'phase', ARGV[i + 2], 'step', ARGV[i + 3], 'total', ARGV[i + 4])
    written = written + 1
  end
end
redis.call('PUBLISH', key.progress, ARGV[1])
return written
