-- Part of the scripts that choose a signature for a worker: models in its memory go first, within bounds.

local model_loads = {}
-- While a worker has work for a loaded model, other models wait for this many times their load time.
local LOADS_WAITED = 3
-- A worker holds a model for this long after a heartbeat that named it: six heartbeats.
local HELD_MS = 3000

-- The time (ms) that orders a signature among others. s.ready: since when it is ready; s.load: ms to load its model on this
-- worker, 0 if loaded; s.holders: other workers that hold it.
function model_loads.sort_ms(s)
  return s.ready + LOADS_WAITED * s.load * (s.holders > 0 and 2 or 1)
end

-- From when an idle worker can claim it (ms). A model held by others is left to them for one load time, after which loading
-- it would have been worth it; at once if each holder has more than one load time of work (s.work, ms).
function model_loads.free_at(s)
  if s.holders == 0 or s.work > s.load * s.holders then return s.ready end
  return s.ready + s.load
end

-- Models in ARGV from index `from`, each followed by the ms to load it, negative if its last load failed.
function model_loads.models(from)
  local models = {}
  for at = from, #ARGV, 2 do
    local load = tonumber(ARGV[at + 1])
    table.insert(models, {name = ARGV[at], load = math.abs(load), failed = load < 0})
  end
  return models
end

-- Record that a worker holds a model or loads it.
function model_loads.hold(model, worker, now)
  redis.call('ZADD', key.model_holders(model), whole(now), worker)
  redis.call('ZREMRANGEBYSCORE', key.model_holders(model), '-inf', whole(now - 30000))
  redis.call('PEXPIRE', key.model_holders(model), 30000)
end

local function others_holding(model, worker, now)
  local own = tonumber(redis.call('ZSCORE', key.model_holders(model), worker) or nil)
  local last = now + HELD_MS -- a later heartbeat was written before the clock was set back
  local all = redis.call('ZCOUNT', key.model_holders(model), whole(now - HELD_MS), whole(last))
  return own and own >= now - HELD_MS and own <= last and all - 1 or all
end

-- Queued work of a signature in ms of one GPU; 0 if its cost is unknown.
local function work_of(sig, model)
  local cost = redis.call('HGET', key.slot_cost(sig), 'slot_s') or redis.call('HGET', key.slot_cost('model|' .. model), 'slot_s')
  if not cost then return 0 end
  local slots = 0
  for _, count in ipairs(redis.call('HMGET', key.signature(sig), 'slots:0', 'slots:1', 'slots:2')) do
    slots = slots + math.max(0, tonumber(count or 0) or 0)
  end
  return 1000 * slots * tonumber(cost)
end

-- Add to rows of ready signatures of one model and priority, each with its ready time: row.sort_ms, row.free (from when the
-- worker can claim it) and row.load_justified (nothing to load, or jobs have already waited LOADS_WAITED load times, twice as
-- many if other workers hold the model).
function model_loads.place(rows, worker, model, rank, now)
  local holders, work = 0, 0
  if rows[1] and model.load > 0 then holders = others_holding(model.name, worker, now) end
  if holders > 0 then
    for _, sig in ipairs(redis.call('ZRANGEBYSCORE', key.ready(model.name, rank), '-inf', whole(now), 'LIMIT', 0, 4)) do
      work = work + work_of(sig, model.name)
    end
  end
  for _, row in ipairs(rows) do
    local facts = {ready = row.ready, load = model.load, holders = holders, work = work}
    row.sort_ms, row.free = model_loads.sort_ms(facts), model_loads.free_at(facts)
    row.load_justified = model.load == 0 or row.sort_ms <= now
  end
  return rows
end
