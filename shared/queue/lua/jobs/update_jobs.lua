-- NEEDS job_record job_state lane_changes
-- RUNS when Redis is full
-- Change the priority or the deadline of queued jobs. They keep their arrival. A change that was made before is none.
-- args     rank, deadline, jobs...
--          `rank`: none to keep it; `deadline`: in ms, 0 for none, none to keep it; `jobs`: the `known` wire form of each
--          becomes `wire`
-- Returns  for each 'queued' if it is changed, 'stale' if it has another wire form now, its state, '' if it is unknown
local now, rank, deadline, out = clock_ms(), args.rank, args.deadline, {}

local function update(change)
  local id, known, wire, steps = change.job_id, change.known, change.wire, change.steps
  local job = job_record.load(id)
  if not job then return '' end
  if job.job == wire then return 'queued' end
  if job.state ~= 'queued' then return job.state end
  if job.job ~= known then return 'stale' end
  lane_changes.leave(id, job)
  if rank and rank ~= job.rank then
    job.rank = rank
    redis.call('HSET', key.job(id), 'rank', rank)
  end
  if deadline then job_state.set_deadline(id, job, deadline > 0 and whole(deadline) or nil, steps, now) end
  lane_changes.enter(id, job, now)
  job_record.resize(id, job, footprint.resized(job.size, #wire - #known))
  redis.call('HSET', key.job(id), 'job', wire)
  return 'queued'
end

for at, change in ipairs(args.jobs) do out[at] = update(change) end
lane_changes.write(now)
queue.wake()
return out
