-- Part of take: bulk jobs get a share of the slots however many others are queued. bulk_credit has the slots that are due to
-- the bulk jobs of a model. It grows with the slots of others that start while bulk jobs are ready, and shrinks with bulk
-- slots down to a debt: a batch takes more than is due.

local bulk_share = {}
local MOST_DUE = 64
local KEEP_MS = 3600000

local function set(model, credit)
  redis.call('HSET', key.bulk_credit, model, string.format('%.6g', math.min(MOST_DUE, credit)))
  redis.call('PEXPIRE', key.bulk_credit, KEEP_MS)
end

local function credit_of(model) return tonumber(redis.call('HGET', key.bulk_credit, model) or nil) or 0 end

-- Record the slots that a batch has claimed. growth: of the credit of each of `models` for a slot above bulk.
function bulk_share.record(models, batch, growth)
  local bulk, above = batch.of_rank[2], batch.of_rank[0] + batch.of_rank[1]
  local credit = bulk > 0 and credit_of(batch.model) or 0
  if credit > 0 then set(batch.model, math.max(-MOST_DUE, credit - bulk)) end
  if above <= 0 then return end
  for _, name in ipairs(models) do set(name, credit_of(name) + growth * above) end
end
