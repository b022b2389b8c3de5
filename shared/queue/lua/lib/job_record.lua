-- NEEDS footprint
-- Part of the scripts that read jobs: the record of a job.

local job_record = {}
local FACTS = {'state', 'tenant', 'sig', 'model', 'rank', 'slots', 'src', 'entry', 'batch', 'input', 'solo', 'cancel',
  'losses', 'webhook', 'deadline', 'worker', 'epoch', 'arrived', 'started', 'attempts', 'returned', 'passed', 'job', 'video',
  'charged', 'size', 'start_by', 'on_deadline', 'steps', 'checkpoint', 'checkpoint_size', 'left', 'paused', 'group',
  'wait_until', 'parents', 'sources'}

-- The fields of a job that scripts need, or nil.
function job_record.load(id)
  local values = redis.call('HMGET', key.job(id), unpack(FACTS))
  if not values[1] or not values[2] or not values[3] then return nil end
  local job = {}
  for at, name in ipairs(FACTS) do job[name] = values[at] or nil end
  job.rank, job.slots = tonumber(job.rank), tonumber(job.slots)
  return job
end

-- Time until a job's latest start (ms), -1 after it or without one.
function job_record.slack(job, now)
  local slack = job.start_by and tonumber(job.start_by) - now or -1
  return slack > 0 and slack or -1
end

-- The reply for a claim: `take.lua` has its columns.
function job_record.claimed(id, job, epoch, waited, now)
  local time_left = job.deadline and math.max(0, tonumber(job.deadline) - now) or -1
  return {id, job.job or '', job.sig, epoch, job.solo and 1 or 0, waited, time_left, job_record.slack(job, now),
    job.checkpoint or ''}
end

-- Replace the size of a job that has not ended.
function job_record.resize(id, job, size)
  footprint.change(job.tenant, job.size, size)
  redis.call('HSET', key.job(id), 'size', size)
  job.size = size
end

-- Name the checkpoint of a job in its record, instead of an earlier one: its text, and the size of its objects as in footprint.
-- `left`: the part of the job's steps that is left after it. Without a text the record names none.
function job_record.set_checkpoint(id, job, checkpoint, size, left)
  footprint.add_checkpoint(footprint.numbers(size)[4] - footprint.numbers(job.checkpoint_size)[4])
  job_record.resize(id, job, footprint.replaced(job.size, job.checkpoint_size, size))
  redis.call('HDEL', key.job(id), 'checkpoint', 'checkpoint_size', 'checkpoint_losses', 'left')
  job.checkpoint, job.checkpoint_size, job.left = checkpoint, size, left
  if checkpoint then
    redis.call('HSET', key.job(id), 'checkpoint', checkpoint, 'checkpoint_size', size, 'left', string.format('%.4g', left))
  end
end
