-- NEEDS job_state lane_changes
-- RUNS when Redis is full
-- Change the priority or the deadline of queued jobs. They keep their arrival. A change that was made before is none.
-- ARGV     rank, deadline, jobs...
--          `rank`: '' to keep it; `deadline`: in ms, 0 for none, '' to keep it; `jobs`: id, wire form, new wire form and steps of each
-- Returns  for each 'queued' if it is changed, 'stale' if it has another wire form now, its state, '' if it is unknown
local now, rank, deadline, out = clock_ms(), tonumber(ARGV[1]), ARGV[2], {}

local function update(id, known, wire, steps)
  local job = job_state.load(id)
  if not job then return '' end
  if job.job == wire then return 'queued' end
  if job.state ~= 'queued' then return job.state end
  if job.job ~= known then return 'stale' end
  lane_changes.leave(id, job)
  if rank and rank ~= job.rank then
    job.rank = rank
    redis.call('HSET', key.job(id), 'rank', rank)
  end
  if deadline ~= '' then job_state.set_deadline(id, job, deadline ~= '0' and deadline or nil, steps, now) end
  lane_changes.enter(id, job, now)
  job_state.resize(id, job, footprint.resized(job.size, #wire - #known))
  redis.call('HSET', key.job(id), 'job', wire)
  return 'queued'
end

for at = 3, #ARGV, 4 do table.insert(out, update(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])) end
lane_changes.write(now)
queue.wake()
return out
