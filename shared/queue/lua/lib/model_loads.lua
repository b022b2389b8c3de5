-- Part of the scripts that choose a signature for a worker: models in its memory go first, within bounds.

local model_loads = {}
-- While a worker has work for a model in its memory, others wait for so many times as long as their load takes.
local LOADS_WAITED = 3
-- A worker that has not said for so long that it holds a model counts as one that does not: six heartbeats.
local HELD_MS = 3000

-- When a signature takes its turn, as if it had became ready then (ms). s.ready: since when it is; s.load: how long loading its
-- model takes here, 0 where it is in memory; s.holders: other workers that have it.
function model_loads.turn_at(s)
  return s.ready + LOADS_WAITED * s.load * (s.holders > 0 and 2 or 1)
end

-- From when on a worker without other work may take it (ms). What others hold is left to them for as long as a load
-- takes, by when it would have paid; at once where there is more work (s.work, ms) for each than a load takes.
function model_loads.free_at(s)
  if s.holders == 0 or s.work > s.load * s.holders then return s.ready end
  return s.ready + s.load
end

-- Models from that place of ARGV on, each followed by how long it takes to load, negative where its last load failed.
function model_loads.models(from)
  local models = {}
  for at = from, #ARGV, 2 do
    local load = tonumber(ARGV[at + 1])
    table.insert(models, {name = ARGV[at], load = math.abs(load), failed = load < 0})
  end
  return models
end

-- Note that a worker has a model in its memory, or loads it.
function model_loads.hold(model, worker, now)
  redis.call('ZADD', key.model_holders(model), whole(now), worker)
  redis.call('ZREMRANGEBYSCORE', key.model_holders(model), '-inf', whole(now - 30000))
  redis.call('PEXPIRE', key.model_holders(model), 30000)
end

local function others_holding(model, worker, now)
  local own = tonumber(redis.call('ZSCORE', key.model_holders(model), worker) or nil)
  local all = redis.call('ZCOUNT', key.model_holders(model), whole(now - HELD_MS), '+inf')
  return own and own >= now - HELD_MS and all - 1 or all
end

-- Milliseconds of one GPU that wait of a signature; 0 where no job of its model has outcome what it costs.
local function work_of(sig, model)
  local cost = redis.call('HGET', key.slot_cost(sig), 'slot_s') or redis.call('HGET', key.slot_cost('model|' .. model), 'slot_s')
  if not cost then return 0 end
  local slots = 0
  for _, count in ipairs(redis.call('HMGET', key.signature(sig), 'slots:0', 'slots:1', 'slots:2')) do
    slots = slots + math.max(0, tonumber(count or 0) or 0)
  end
  return 1000 * slots * tonumber(cost)
end

-- The first `most` signatures of a model and priority in line that are ready by `before`: when each became ready, takes its
-- turn on a worker, and may be taken by it.
function model_loads.candidates(worker, model, rank, before, most, now)
  local rows, found, work = {}, nil, 0
  found = redis.call('ZRANGEBYSCORE', key.ready(model.name, rank), '-inf', before, 'WITHSCORES', 'LIMIT', 0, most)
  for at = 1, #found, 2 do table.insert(rows, {sig = found[at], ready = tonumber(found[at + 1])}) end
  local holders = rows[1] and model.load > 0 and others_holding(model.name, worker, now) or 0
  if holders > 0 then
    for _, row in ipairs(rows) do work = work + work_of(row.sig, model.name) end
  end
  for _, row in ipairs(rows) do
    local facts = {ready = row.ready, load = model.load, holders = holders, work = work}
    row.turn, row.free = model_loads.turn_at(facts), model_loads.free_at(facts)
  end
  return rows
end
