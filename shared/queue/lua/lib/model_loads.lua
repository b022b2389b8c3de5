-- Part of the scripts that choose a signature for a worker: which models workers hold, and how much work waits for each.

local model_loads = {}
-- A worker holds a model for this long after a heartbeat that named it: six heartbeats.
local HELD_MS = 3000

-- Record that a worker holds a model or loads it.
function model_loads.hold(model, worker, now)
  redis.call('ZADD', key.model_holders(model), whole(now), worker)
  redis.call('ZREMRANGEBYSCORE', key.model_holders(model), '-inf', whole(now - 30000))
  redis.call('PEXPIRE', key.model_holders(model), 30000)
end

-- How many other workers hold a model.
function model_loads.others_holding(model, worker, now)
  local own = tonumber(redis.call('ZSCORE', key.model_holders(model), worker) or nil)
  local last = now + HELD_MS -- a later heartbeat was written before the clock was set back
  local all = redis.call('ZCOUNT', key.model_holders(model), whole(now - HELD_MS), whole(last))
  return own and own >= now - HELD_MS and own <= last and all - 1 or all
end

-- Queued work of a signature in ms of one GPU; 0 if its cost is unknown.
local function work_of(sig, model)
  local cost = redis.call('HGET', key.slot_cost(sig), 'slot_s')
    or redis.call('HGET', key.slot_cost('model|' .. model), 'slot_s')
  if not cost then return 0 end
  local slots = 0
  for _, count in ipairs(redis.call('HMGET', key.signature(sig), 'slots:0', 'slots:1', 'slots:2')) do
    slots = slots + math.max(0, tonumber(count or nil) or 0)
  end
  return 1000 * slots * tonumber(cost)
end

-- Work of the signatures of a model and priority that have been ready longest, in ms of one GPU.
function model_loads.queued_work(model, rank, now)
  local work = 0
  for _, sig in ipairs(redis.call('ZRANGEBYSCORE', key.ready(model, rank), '-inf', whole(now), 'LIMIT', 0, 4)) do
    work = work + work_of(sig, model)
  end
  return work
end
