-- RUNS when Redis is full
-- Publish the progress of jobs whose epoch is current in one message: each message wakes every subscribed process.
-- args     reports...
--          `reports`: `stored` in the job's record, or published only
-- Returns  how many are current
local rows = {}
for _, one in ipairs(args.reports) do
  local name = key.job(one.job_id)
  local job = redis.call('HMGET', name, 'state', 'epoch')
  if job[1] == 'running' and tonumber(job[2] or nil) == one.epoch then
    if one.stored then redis.call('HSET', name, 'phase', one.phase, 'step', one.step, 'total', one.total) end
    table.insert(rows, {job = one.job_id, phase = one.phase, step = one.step, total = one.total})
  end
end
if rows[1] then redis.call('PUBLISH', key.progress, cjson.encode(rows)) end
return #rows
