-- NEEDS fill last_claim model_loads
-- RUNS when Redis is full
-- Let a running batch claim more jobs of its signature, ready or not, while no other signature is overdue.
-- ARGV     worker, token, signature, slots, lowest_rank, models...
--          `token`, `models`: as in claim
-- Returns  as claim; nil if queued jobs were held back for another signature
local worker, token, sig, slots, lowest = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local models = model_loads.models(6)
local now = clock_ms()

-- Whether the next claim would choose another signature; if its model must be loaded first, its turn must have come.
local function overdue(other, model, rank)
  if other.sig == sig or other.turn > now - conf.overdue_ms then return false end
  if model.load == 0 then return true end
  local own = tonumber(redis.call('ZSCORE', key.ready(redis.call('HGET', key.signature(sig), 'model'), rank), sig) or nil)
  return other.free <= now and not (own and own <= other.turn)
end

-- The first rank in which another signature, or a lost job of this one, is overdue: only higher priorities can join.
local function overdue_rank()
  for rank = 0, lowest do
    local lost = queue.first(key.solo(sig), rank)
    local since = lost and tonumber(redis.call('HGET', key.job(lost), 'returned') or nil)
    if since and since <= now - conf.overdue_ms then return rank end
    for _, model in ipairs(models) do
      for _, other in ipairs(model_loads.candidates(worker, model, rank, whole(now - conf.overdue_ms), 2, now)) do
        if overdue(other, model, rank) then return rank end
      end
    end
  end
  return 3
end

-- The reply without claims: nil if jobs of a lower priority than `rank` were held back.
local function held_back(rank)
  for below = math.max(0, rank + 1), lowest do
    if (tonumber(redis.call('HGET', key.signature(sig), 'jobs:' .. below) or nil) or 0) > 0 then return nil end
  end
  return {}
end

local repeated = last_claim.repeated(worker, token)
if repeated then return repeated end
if redis.call('EXISTS', key.signature(sig)) == 0 then return {} end
local allowed = math.min(lowest, overdue_rank() - 1)
if allowed < 0 then return held_back(allowed) end
local claims = fill.fill({sig = sig, worker = worker, left = slots, lowest = allowed, now = now, starting = false})
last_claim.keep(worker, token, claims)
return claims[1] and claims or held_back(allowed)
