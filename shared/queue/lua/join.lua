-- NEEDS line ending quota filling swaps
-- Let a running batch take jobs of its signature, ripe or not, where no other signature is overdue.
-- KEYS[1]  prefix
-- ARGV     worker, signature, seats, lowest rank that may be claimed, then the models, each with the ms that loading it takes
-- Returns  as claim; a single {'overdue'} where jobs wait that were not given for another signature's sake
local worker, sig, seats, lowest = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local models = swaps.models(5)
local now = clock_ms()

-- Whether the next claim would give another signature: for one whose model must be loaded first, its turn has to have come.
local function overdue(other, model, rank)
  if other.sig == sig or other.turn > now - conf.overdue_ms then return false end
  if model.load == 0 then return true end
  local own = tonumber(redis.call('ZSCORE', key.ripe(redis.call('HGET', key.sig(sig), 'model'), rank), sig) or nil)
  return other.free <= now and not (own and own <= other.turn)
end

-- The most urgent rank in which another signature, or a lost job of this one, is overdue: only more urgent jobs than that
-- may still join.
local function overdue_rank()
  for rank = 0, lowest do
    local lost = line.first(key.alone(sig), rank)
    local since = lost and tonumber(redis.call('HGET', key.job(lost), 'returned') or nil)
    if since and since <= now - conf.overdue_ms then return rank end
    for _, model in ipairs(models) do
      for _, other in ipairs(swaps.in_line(worker, model, rank, whole(now - conf.overdue_ms), 2, now)) do
        if overdue(other, model, rank) then return rank end
      end
    end
  end
  return 3
end

-- The answer where nothing is given: whether anything less urgent than `rank` would have been, is told.
local function held_back(rank)
  for below = math.max(0, rank + 1), lowest do
    if (tonumber(redis.call('HGET', key.sig(sig), 'jobs:' .. below) or nil) or 0) > 0 then return {{'overdue'}} end
  end
  return {}
end

if redis.call('EXISTS', key.sig(sig)) == 0 then return {} end
local allowed = math.min(lowest, overdue_rank() - 1)
if allowed < 0 then return held_back(allowed) end
local claims = filling.fill({sig = sig, worker = worker, left = seats, lowest = allowed, now = now, starting = false})
return claims[1] and claims or held_back(allowed)
