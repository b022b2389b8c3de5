-- Part of the scripts of batches and of those that end jobs: when a batch is due, and whose turn it is.

local batch_turns = {}

-- Set the next turn of a tenant with active batches: when its first one is due, but not before its last turn.
-- `served`: this is its turn.
function batch_turns.refresh(tenant, now, served)
  local first = redis.call('ZRANGE', key.active_batches(tenant), 0, 0, 'WITHSCORES')
  if not first[2] then return redis.call('ZREM', key.batch_tenants, tenant) end
  local last = served and now or tonumber(redis.call('ZSCORE', key.batch_tenants, tenant) or 0)
  local at = last <= now and math.max(last, tonumber(first[2])) or tonumber(first[2])
  redis.call('ZADD', key.batch_tenants, whole(at), tenant)
end

-- Make a batch due at a time; one that is not active only if it is `new`.
function batch_turns.set_due(tenant, batch, at, now, new)
  if new then redis.call('ZADD', key.active_batches(tenant), whole(at), batch)
  else redis.call('ZADD', key.active_batches(tenant), 'XX', whole(at), batch) end
  batch_turns.refresh(tenant, now)
end

local ENDED_BATCH = {completed = true, failed = true, expired = true, cancelled = true}

-- Count a job of a batch as ended, once and before the end of the batch, and make the batch due after its last job. Returns
-- until when the job must be kept: the batch reads it at its end.
function batch_turns.count_ended(id, job, state, now)
  if not job.batch then return 0 end
  local name = key.batch(job.tenant, job.batch)
  local batch = redis.call('HMGET', name, 'keep_until', 'accepted', 'status')
  if not batch[1] then return 0 end
  if ENDED_BATCH[batch[3]] then return tonumber(batch[1]) end
  if redis.call('HSETNX', key.job(id), 'counted', 1) == 1 then
    redis.call('HINCRBY', name, state == 'succeeded' and 'completed' or 'failed', 1)
    local ended = redis.call('HINCRBY', name, 'ended', 1)
    if ended >= (tonumber(batch[2] or nil) or 0) then
      batch_turns.set_due(job.tenant, job.batch, now, now)
    end
  end
  return tonumber(batch[1])
end
