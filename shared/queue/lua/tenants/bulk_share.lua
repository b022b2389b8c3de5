-- Part of claim and join: bulk jobs get a share of the slots however many others are queued. bulk_credit has the slots that
-- are due to the bulk jobs of a model. It grows with the slots of others that start while bulk jobs are ready, and shrinks
-- with bulk slots down to a debt: a batch takes more than is due. While a slot is due, bulk precedes standard.

local bulk_share = {}
local MOST_DUE = 64
local KEEP_MS = 3600000

-- The credit that `slots` above bulk add: bulk gets `share` of the sum of both.
function bulk_share.growth(slots, share) return slots * share / (1 - share) end

-- The models in which bulk jobs precede standard ones, as a set.
function bulk_share.due(models, lowest)
  local due, names = {}, {}
  if lowest < 2 or conf.bulk_share <= 0 or not models[1] then return due end
  for at, model in ipairs(models) do names[at] = model.name end
  for at, credit in ipairs(redis.call('HMGET', key.bulk_credit, unpack(names))) do
    due[names[at]] = (tonumber(credit or nil) or 0) >= 1 or nil
  end
  return due
end

local function set(model, credit)
  redis.call('HSET', key.bulk_credit, model, string.format('%.6g', math.min(MOST_DUE, credit)))
  redis.call('PEXPIRE', key.bulk_credit, KEEP_MS)
end

local function credit_of(model) return tonumber(redis.call('HGET', key.bulk_credit, model) or nil) or 0 end

-- Record the slots of a claim of `model`: `bulk` ones, and `above` of a higher priority.
function bulk_share.record(models, model, bulk, above, now)
  if conf.bulk_share <= 0 then return end
  if bulk > 0 then
    local credit = credit_of(model)
    if credit > 0 then set(model, math.max(-MOST_DUE, credit - bulk)) end
  end
  if above <= 0 then return end
  local orders, waiting = {}, {}
  for at, one in ipairs(models) do orders[at] = key.tenant_order(one.name, 2) end
  if not orders[1] or redis.call('EXISTS', unpack(orders)) == 0 then return end
  for _, one in ipairs(models) do
    local first = redis.call('ZRANGE', key.ready(one.name, 2), 0, 0, 'WITHSCORES')
    if first[1] and tonumber(first[2]) <= now then table.insert(waiting, one.name) end
  end
  for _, name in ipairs(waiting) do
    set(name, credit_of(name) + bulk_share.growth(above, conf.bulk_share) / #waiting)
  end
end
