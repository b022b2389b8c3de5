-- NEEDS footprint
-- RUNS when Redis is full
-- Items whose retention has ended. Inputs that a job uses and files that a batch reads are postponed; of an input that was
-- stored again, only the old object is returned. A job that was deleted and submitted again is kept.
-- args     limit
-- Returns  rows 'job|tenant|id|batch|size', 'input|tenant|id|object|size', 'file|tenant|id|' and 'adapter|tenant|id||size'
local now, out = clock_ms(), {}

local function is_unfinished(row)
  local id = string.match(row, '^job|[^|]*|([^|]*)|')
  local state = id and redis.call('HGET', key.job(id), 'state')
  return state == 'queued' or state == 'running'
end

for _, row in ipairs(redis.call('ZRANGEBYSCORE', key.retention, '-inf', whole(now), 'LIMIT', 0, args.limit)) do
  local tenant, id, object = string.match(row, '^input|([^|]*)|([^|]*)|([^|]*)')
  local live, current = 0, nil
  local reader, file = string.match(row, '^file|([^|]*)|([^|]*)|$')
  if reader then live = tonumber(redis.call('HGET', key.file(reader, file), 'live') or nil) or 0 end
  if tenant then
    local known = redis.call('HMGET', key.input(tenant, id), 'live', 'object')
    live, current = tonumber(known[1] or nil) or 0, known[2] or object
    if object == '' then object = current end -- a row without an object stands for the whole input
    if current ~= object then live = 0 end
  end
  if is_unfinished(row) then
    redis.call('ZREM', key.retention, row)
    footprint.change(string.match(row, '^job|([^|]*)'), string.match(row, '([^|]*)$'), '')
  elseif live > 0 then
    redis.call('ZADD', key.retention, whole(now + conf.input_retention_ms), row)
  else
    if tenant and current == object then
      redis.call('DEL', key.input(tenant, id))
      redis.call('ZREM', key.inputs(tenant), id)
    end
    table.insert(out, row)
  end
end
return out
