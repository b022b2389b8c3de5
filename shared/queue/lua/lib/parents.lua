-- NEEDS children job_record job_state later sources
-- Part of the scripts that tell jobs of the end of those that they wait for.

local parents = {}
local TURN = 10 -- children of a parent that are told before those of another tenant's
local PAST = {failed = 'has failed', canceled = 'was canceled', expired = 'has expired', gone = 'is gone'}

local function fail(id, job, parent, state, now)
  local message = 'job ' .. parent .. ', for which it waited, ' .. PAST[state]
  redis.call('HSET', key.job(id), 'error', cjson.encode({code = 'parent_failed', message = message, retryable = false}))
  job_state.leave_queue(id, job)
  job_state.finish(id, job, 'failed', now)
end

-- Tell a waiting job that one of its parents has ended. It fails if that has not succeeded, unless it is to run all the same
-- and does not start from its result; after the last parent it is due, or at its own time.
function parents.tell(id, parent, state, now)
  local job = job_record.load(id)
  if not job or job.state ~= 'queued' or not job.parents then return end
  local left = {}
  for one in string.gmatch(job.parents, '%S+') do if one ~= parent then table.insert(left, one) end end
  local rest = table.concat(left, ' ')
  if rest == job.parents then return end
  local runs_anyway = redis.call('HGET', key.job(id), 'on_parent') == 'run' and not sources.has(job.sources, parent)
  if state ~= 'succeeded' and not runs_anyway then
    return fail(id, job, parent, state, now)
  end
  children.unlink(id, parent)
  if left[1] then return redis.call('HSET', key.job(id), 'parents', rest) end
  redis.call('HDEL', key.job(id), 'parents', 'on_parent')
  job.parents, job.wait_until = nil, whole(math.max(now, tonumber(job.wait_until) or 0))
  redis.call('HSET', key.job(id), 'wait_until', job.wait_until, 'arrived', job.wait_until)
  if job.src == 'waiting' then later.add(id, job) end
end

-- Tell up to `most` children of parents that have ended, in turns of tenants, and return how many.
function parents.tell_children(most, now)
  local told = 0
  while told < most do
    local row = redis.call('ZRANGE', key.ended_parents, 0, 0)[1]
    if not row then
      redis.call('DEL', key.told_turns)
      return told
    end
    local state, parent, event = string.match(row, '^(%a+)|([^|]+)|(.+)$')
    local ids = redis.call('ZRANGE', key.told(event), 0, math.min(TURN, most - told) - 1)
    for _, id in ipairs(ids) do
      redis.call('ZREM', key.told(event), id)
      parents.tell(id, parent, state, now)
    end
    told = told + #ids
    if redis.call('EXISTS', key.told(event)) == 0 then
      redis.call('ZREM', key.ended_parents, row)
    else
      redis.call('ZINCRBY', key.ended_parents, #ids, row)
    end
  end
  return told
end
