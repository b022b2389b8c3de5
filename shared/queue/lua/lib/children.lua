-- Part of the scripts that queue or end jobs: which jobs wait for the end of another. children:<parent> has those that wait,
-- whose field `parents` has the ids of the ones that have not ended. When a parent ends, its set becomes told:<event>, and
-- `ended_parents` lists it as 'state|parent|event': `queue_due` tells the children, in bounded pieces. Tenants take turns: a
-- parent's score grows with the children that are told, and begins where all parents of its tenant before it will end.

local children = {}

-- Let a job wait for its parents.
function children.link(id, parents, now)
  for parent in string.gmatch(parents, '%S+') do redis.call('ZADD', key.children(parent), whole(now), id) end
end

-- A job that ends waits for none any more.
function children.unlink(id, parents)
  for parent in string.gmatch(parents, '%S+') do redis.call('ZREM', key.children(parent), id) end
end

-- Note that a job has ended, with the `event` of its end. A tenant without such jobs begins at the score of the first one.
function children.note_end(id, tenant, state, event, now)
  local count = redis.call('ZCARD', key.children(id))
  if count == 0 then return end
  redis.call('RENAME', key.children(id), key.told(event))
  local first = tonumber(redis.call('ZRANGE', key.ended_parents, 0, 0, 'WITHSCORES')[2] or now)
  local turn = math.max(first, tonumber(redis.call('HGET', key.told_turns, tenant) or nil) or first)
  redis.call('ZADD', key.ended_parents, whole(turn), state .. '|' .. id .. '|' .. event)
  redis.call('HSET', key.told_turns, tenant, whole(turn + count))
end
