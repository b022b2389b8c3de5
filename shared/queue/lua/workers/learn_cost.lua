-- RUNS when Redis is full
-- Add a measured forward to a cost curve, list the curve, and store which device measured the shape last.
-- args     device, model, shape, rows, seconds, most
--          `most`: listed curves of a model, those measured last
-- Returns  1
local name = key.cost_curve(args.device, args.model, args.shape)
local seconds = args.seconds
local mean = tonumber(redis.call('HGET', name, args.rows) or nil)
if mean then seconds = mean + 0.2 * (seconds - mean) end
redis.call('HSET', name, args.rows, string.format('%.9g', seconds))
redis.call('PEXPIRE', name, 30 * 86400000)
redis.call('SET', key.cost_device(args.model, args.shape), args.device, 'PX', 30 * 86400000)
local shapes = key.cost_shapes(args.model)
redis.call('ZADD', shapes, whole(clock_ms()), args.device .. '|' .. args.shape)
redis.call('ZREMRANGEBYRANK', shapes, 0, -1 - args.most)
redis.call('PEXPIRE', shapes, 30 * 86400000)
return 1
