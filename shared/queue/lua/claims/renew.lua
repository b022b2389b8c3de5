-- RUNS when Redis is full
-- Renew the leases of those claims that are still this worker's.
-- ARGV     worker, claims...
--          `claims`: pairs of job id and epoch
-- Returns  {ids that are no longer this worker's, ids to cancel}
local worker = ARGV[1]
local until_ms = whole(clock_ms() + conf.lease_ms)
local lost, cancel = {}, {}
for at = 2, #ARGV, 2 do
  local job = redis.call('HMGET', key.job(ARGV[at]), 'state', 'worker', 'epoch', 'cancel')
  if job[1] == 'running' and job[2] == worker and job[3] == ARGV[at + 1] then
    redis.call('ZADD', key.leases, until_ms, ARGV[at])
    if job[4] then table.insert(cancel, ARGV[at]) end
  else
    table.insert(lost, ARGV[at])
  end
end
return {lost, cancel}
