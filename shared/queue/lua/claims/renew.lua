-- RUNS when Redis is full
-- Renew the leases of those claims that are still this worker's.
-- args     worker, claims...
-- Returns  {ids that are no longer this worker's, ids to cancel, ids to pause}
local worker = args.worker
local until_ms = whole(clock_ms() + conf.lease_ms)
local lost, cancel, pause = {}, {}, {}
for _, claim in ipairs(args.claims) do
  local job = redis.call('HMGET', key.job(claim.job_id), 'state', 'worker', 'epoch', 'cancel', 'paused')
  if job[1] == 'running' and job[2] == worker and tonumber(job[3] or nil) == claim.epoch then
    redis.call('ZADD', key.leases, until_ms, claim.job_id)
    if job[4] then table.insert(cancel, claim.job_id) elseif job[5] then table.insert(pause, claim.job_id) end
  else
    table.insert(lost, claim.job_id)
  end
end
return {lost, cancel, pause}
