-- Part of the scripts that queue or end jobs: which jobs start from an artifact of another one, their source.
-- dependents:<source> has those that have not ended. A source that has ended is kept as long as it has any.

local sources = {}
local LEFT_MS = 600000 -- of a source that is kept for its dependents only, after the end of the last one

-- Keep the sources of a job, those that there are, until it ends.
function sources.hold(id, ids, now)
  for source in string.gmatch(ids, '%S+') do
    if redis.call('EXISTS', key.job(source)) == 1 then
      redis.call('ZADD', key.dependents(source), whole(now), id)
      redis.call('PERSIST', key.job(source))
    end
  end
end

-- Note that a job has ended: a source without other dependents is kept for its own time only.
function sources.release(id, ids, now)
  for source in string.gmatch(ids, '%S+') do
    redis.call('ZREM', key.dependents(source), id)
    local known = redis.call('HMGET', key.job(source), 'state', 'expires')
    local has_ended = known[1] and known[1] ~= 'queued' and known[1] ~= 'running'
    if has_ended and not sources.is_needed(source) then
      local left = (tonumber(known[2] or nil) or now) - now
      redis.call('PEXPIRE', key.job(source), whole(math.max(left, LEFT_MS)))
    end
  end
end

-- Whether a job that has not ended starts from an artifact of this one.
function sources.is_needed(id) return redis.call('EXISTS', key.dependents(id)) == 1 end

-- Whether a job starts from an artifact of `source`.
function sources.has(ids, source) return string.find(' ' .. (ids or '') .. ' ', ' ' .. source .. ' ', 1, true) ~= nil end
