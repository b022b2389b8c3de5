-- Part of the scripts that find jobs which cannot run.

local dead_letters = {}

-- Forget dead letters that have expired: all before a time, and some whose hash is gone.
function dead_letters.forget_expired(now)
  redis.call('ZREMRANGEBYSCORE', key.dead_letters, '-inf', whole(now - conf.dead_ms))
  for _, id in ipairs(redis.call('ZRANGE', key.dead_letters, 0, 99)) do
    if redis.call('EXISTS', key.dead_letter(id)) == 1 then return end
    redis.call('ZREM', key.dead_letters, id)
  end
end

function dead_letters.bury(id, reason, detail, now)
  dead_letters.forget_expired(now)
  redis.call('INCR', key.dead_letters_added)
  redis.call('ZADD', key.dead_letters, whole(now), id)
  redis.call('HSET', key.dead_letter(id), 'at', whole(now), 'reason', reason, 'detail', detail)
  redis.call('PEXPIRE', key.dead_letter(id), conf.dead_ms)
  local surplus = redis.call('ZCARD', key.dead_letters) - conf.dead_cap
  if surplus > 0 then
    for _, old in ipairs(redis.call('ZRANGE', key.dead_letters, 0, surplus - 1)) do redis.call('DEL', key.dead_letter(old)) end
    redis.call('ZREMRANGEBYRANK', key.dead_letters, 0, surplus - 1)
  end
end
