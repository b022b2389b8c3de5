-- RUNS when Redis is full
-- Record which workers are to have a model in memory, in place of the last such order; forget orders for ended workers.
-- args     scope, model, row, most
--          `scope`: 'all', 'pool:<name>' or 'worker:<id>'; `most`: orders at a time
-- Returns  1, or 0 if there are too many orders
for _, field in ipairs(redis.call('HKEYS', key.model_orders)) do
  local worker = string.match(field, '^worker:([^|]*)|')
  if worker and not redis.call('ZSCORE', key.workers, worker) then redis.call('HDEL', key.model_orders, field) end
end
local name = args.scope .. '|' .. args.model
local is_new = redis.call('HEXISTS', key.model_orders, name) == 0
if is_new and redis.call('HLEN', key.model_orders) >= args.most then return 0 end
redis.call('HSET', key.model_orders, name, args.row)
return 1
