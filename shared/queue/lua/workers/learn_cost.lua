-- RUNS when Redis is full
-- Add a measured forward to a cost curve, list the curve, and store which device measured the shape last.
-- ARGV     device, model, shape, rows, seconds, most
--          `most`: listed curves of a model, those measured last
-- Returns  1
local name = key.cost_curve(ARGV[1], ARGV[2], ARGV[3])
local seconds = tonumber(ARGV[5])
local mean = tonumber(redis.call('HGET', name, ARGV[4]) or nil)
if mean then seconds = mean + 0.2 * (seconds - mean) end
redis.call('HSET', name, ARGV[4], string.format('%.9g', seconds))
redis.call('PEXPIRE', name, 30 * 86400000)
redis.call('SET', key.cost_device(ARGV[2], ARGV[3]), ARGV[1], 'PX', 30 * 86400000)
local shapes = key.cost_shapes(ARGV[2])
redis.call('ZADD', shapes, whole(clock_ms()), ARGV[1] .. '|' .. ARGV[3])
redis.call('ZREMRANGEBYRANK', shapes, 0, -1 - tonumber(ARGV[6]))
redis.call('PEXPIRE', shapes, 30 * 86400000)
return 1
