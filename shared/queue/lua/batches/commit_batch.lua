-- NEEDS events batch_turns footprint
-- RUNS when Redis is full
-- Commit one step of a batch, unless the batch has changed since the step began.
-- args     tenant, batch_id, revision, again_ms, keep_ms, update
--          `again_ms`: none at the batch's end; `update`: JSON {set = {field, value, ..}, add = {field, number, ..},
--          accepted = {line, ..}, parts = {{file id, '<bytes> <name>'}, ..}}
-- Returns  1, or 0 when the batch has changed
local tenant, id = args.tenant, args.batch_id
local name, now = key.batch(tenant, id), clock_ms()
if tonumber(redis.call('HGET', name, 'rev')) ~= args.revision then return 0 end
local update = cjson.decode(args.update)
redis.call('HINCRBY', name, 'rev', 1)
if #update.set > 0 then redis.call('HSET', name, unpack(update.set)) end
for at = 1, #update.add, 2 do redis.call('HINCRBY', name, update.add[at], update.add[at + 1]) end
for _, line in ipairs(update.accepted) do redis.call('SETBIT', key.batch_accepted(tenant, id), line, 1) end
for _, part in ipairs(update.parts) do
  redis.call('RPUSH', key.file_parts(tenant, part[1]), part[2])
  footprint.change(tenant, '', footprint.of_parts({part[2]}))
end
if args.again_ms then
  batch_turns.set_due(tenant, id, now + args.again_ms, now)
  return 1
end
redis.call('ZREM', key.active_batches(tenant), id)
batch_turns.refresh(tenant, now)
events.add_to_outbox(whole(now) .. '-' .. id, id, tenant, 'batch.' .. redis.call('HGET', name, 'status'))
redis.call('PEXPIRE', name, args.keep_ms)
redis.call('PEXPIRE', key.batch_accepted(tenant, id), args.keep_ms)
local file = key.file(tenant, redis.call('HGET', name, 'input_file_id'))
if redis.call('EXISTS', file) == 1 then redis.call('HINCRBY', file, 'live', -1) end
return 1
