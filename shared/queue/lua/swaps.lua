-- Part of the scripts that choose a signature for a worker: models in its memory go first, within bounds.

local swaps = {}
-- While a worker has work for a model in its memory, others wait for so many times as long as their load takes.
local PATIENCE = 3
-- A worker that has not said for so long that it holds a model counts as one that does not: six heartbeats.
local HELD_MS = 3000

-- When a signature takes its turn, as if it had ripened then (ms). s.ripe: since when it is; s.load: how long loading its
-- model takes here, 0 where it is in memory; s.holders: other workers that have it.
function swaps.turn_at(s)
  return s.ripe + PATIENCE * s.load * (s.holders > 0 and 2 or 1)
end

-- From when on a worker without other work may take it (ms). What others hold is left to them for as long as a load
-- takes, by when it would have paid; at once where there is more work (s.work, ms) for each than a load takes.
function swaps.free_at(s)
  if s.holders == 0 or s.work > s.load * s.holders then return s.ripe end
  return s.ripe + s.load
end

-- Models from that place of ARGV on, each followed by how long it takes to load, negative where its last load failed.
function swaps.models(from)
  local models = {}
  for at = from, #ARGV, 2 do
    local load = tonumber(ARGV[at + 1])
    table.insert(models, {name = ARGV[at], load = math.abs(load), failed = load < 0})
  end
  return models
end

-- Note that a worker has a model in its memory, or loads it.
function swaps.hold(model, worker, now)
  redis.call('ZADD', key.holders(model), whole(now), worker)
  redis.call('ZREMRANGEBYSCORE', key.holders(model), '-inf', whole(now - 30000))
  redis.call('PEXPIRE', key.holders(model), 30000)
end

local function others_holding(model, worker, now)
  local own = tonumber(redis.call('ZSCORE', key.holders(model), worker) or nil)
  local all = redis.call('ZCOUNT', key.holders(model), whole(now - HELD_MS), '+inf')
  return own and own >= now - HELD_MS and all - 1 or all
end

-- Milliseconds of one GPU that wait of a signature; 0 where no job of its model has told what it costs.
local function work_of(sig, model)
  local cost = redis.call('HGET', key.cost(sig), 'seat_s') or redis.call('HGET', key.cost('model|' .. model), 'seat_s')
  if not cost then return 0 end
  local seats = 0
  for _, count in ipairs(redis.call('HMGET', key.sig(sig), 'seats:0', 'seats:1', 'seats:2')) do
    seats = seats + math.max(0, tonumber(count or 0) or 0)
  end
  return 1000 * seats * tonumber(cost)
end

-- The first `most` signatures of a model and priority in line that are ripe by `before`: when each ripened, takes its
-- turn on a worker, and may be taken by it.
function swaps.in_line(worker, model, rank, before, most, now)
  local rows, found, work = {}, nil, 0
  found = redis.call('ZRANGEBYSCORE', key.ripe(model.name, rank), '-inf', before, 'WITHSCORES', 'LIMIT', 0, most)
  for at = 1, #found, 2 do table.insert(rows, {sig = found[at], ripe = tonumber(found[at + 1])}) end
  local holders = rows[1] and model.load > 0 and others_holding(model.name, worker, now) or 0
  if holders > 0 then
    for _, row in ipairs(rows) do work = work + work_of(row.sig, model.name) end
  end
  for _, row in ipairs(rows) do
    local facts = {ripe = row.ripe, load = model.load, holders = holders, work = work}
    row.turn, row.free = swaps.turn_at(facts), swaps.free_at(facts)
  end
  return rows
end
