-- Part of the scripts that queue or end jobs: which jobs wait for the end of another. children:<parent> has those that wait,
-- whose field `parents` has the ids of the ones that have not ended. When a parent ends, its set becomes told:<event>, and
-- `ended_parents` lists it as 'state|parent|event': `queue_due` tells the children, in bounded pieces.

local children = {}

-- Let a job wait for its parents.
function children.link(id, parents, now)
  for parent in string.gmatch(parents, '%S+') do redis.call('ZADD', key.children(parent), whole(now), id) end
end

-- A job that ends waits for none any more.
function children.unlink(id, parents)
  for parent in string.gmatch(parents, '%S+') do redis.call('ZREM', key.children(parent), id) end
end

-- Note that a job has ended, with the `event` of its end.
function children.note_end(id, state, event, now)
  if redis.call('EXISTS', key.children(id)) == 0 then return end
  redis.call('RENAME', key.children(id), key.told(event))
  redis.call('ZADD', key.ended_parents, whole(now), state .. '|' .. id .. '|' .. event)
end
