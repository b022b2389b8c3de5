-- NEEDS job_record job_state
-- RUNS when Redis is full
-- End queued jobs that can no longer meet their deadline; the others past their latest start become late.
-- args     limit
-- Returns  how many ended, and how many rows were due: none if no more are
local now, count, rows, touched = clock_ms(), 0, 0, {}

-- The queued jobs of a list that are due; others are removed from it.
local function due(list)
  local jobs = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', list, '-inf', whole(now), 'LIMIT', 0, whole(args.limit - count))) do
    local job = job_record.load(id)
    rows = rows + 1
    if job and job.state == 'queued' then
      table.insert(jobs, {id, job})
      touched[job.sig] = true
    else
      redis.call('ZREM', list, id)
    end
  end
  return jobs
end

local function expire(id, job)
  job_state.expire(id, job, now)
  count = count + 1
end

for _, one in ipairs(due(key.deadlines)) do
  if latest_start.is_missed(one[2], now) then expire(one[1], one[2]) else job_state.become_late(one[1], one[2], now) end
end
for _, one in ipairs(due(key.late)) do
  -- The bound can have fallen since the job was listed.
  if latest_start.is_missed(one[2], now) then expire(one[1], one[2]) else latest_start.set_late(one[1], one[2], now) end
end
for sig in pairs(touched) do queue.refresh(sig, now) end
return {count, rows}
