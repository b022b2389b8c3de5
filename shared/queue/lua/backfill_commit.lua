-- Write what a piece of work on a batch has come to, unless another piece was written since it was begun.
-- KEYS[1]  prefix
-- ARGV     tenant, batch id, revision that the piece began with, ms until the next look | '' at the batch's end,
--          ms to keep a batch that ended, then JSON: {set = {field, value, ..}, add = {field, number, ..},
--          taken = {line, ..}, parts = {{file id, '<bytes> <name>'}, ..}}
-- Returns  1, or 0 when the piece came too late
local tenant, id = ARGV[1], ARGV[2]
local name, row, now = key.backfill(tenant, id), tenant .. '|' .. id, clock_ms()
if redis.call('HGET', name, 'rev') ~= ARGV[3] then return 0 end
local piece = cjson.decode(ARGV[6])
redis.call('HINCRBY', name, 'rev', 1)
if #piece.set > 0 then redis.call('HSET', name, unpack(piece.set)) end
for at = 1, #piece.add, 2 do redis.call('HINCRBY', name, piece.add[at], piece.add[at + 1]) end
for _, line in ipairs(piece.taken) do redis.call('SETBIT', key.taken(tenant, id), line, 1) end
for _, part in ipairs(piece.parts) do redis.call('RPUSH', key.parts(tenant, part[1]), part[2]) end
if ARGV[4] ~= '' then
  redis.call('ZADD', key.backfills, 'XX', whole(now + tonumber(ARGV[4])), row)
  return 1
end
redis.call('ZREM', key.backfills, row)
local told = 'batch.' .. redis.call('HGET', name, 'status')
local wanted = redis.call('HGET', key.hooks(tenant), '*')
if wanted and string.find(wanted, '|' .. told .. '|', 1, true) then
  redis.call('XADD', key.outbox, 'MAXLEN', '~', 1000000, '*', 'event', whole(now) .. '-' .. id, 'job', id,
    'tenant', tenant, 'state', told, 'url', '')
end
redis.call('PEXPIRE', name, ARGV[5])
redis.call('PEXPIRE', key.taken(tenant, id), ARGV[5])
local file = key.file(tenant, redis.call('HGET', name, 'input_file_id'))
if redis.call('EXISTS', file) == 1 then redis.call('HINCRBY', file, 'live', -1) end
return 1
