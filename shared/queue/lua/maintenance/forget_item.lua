-- NEEDS job_record
-- RUNS when Redis is full
-- Delete the record and indexes of an item that storage no longer holds.
-- args     row
--          `row`: of expired_items
-- Returns  1
local row = args.row
local kind, tenant, id, batch, size = string.match(row, '^(%a+)|([^|]*)|([^|]*)|([^|]*)|?(.*)$')
local due = tonumber(redis.call('ZSCORE', key.retention, row) or nil)
-- Stored again in the meantime: a new row has its own time.
if not due or due > clock_ms() then return 1 end
redis.call('ZREM', key.retention, row)
if kind == 'file' then size = footprint.of_parts(redis.call('LRANGE', key.file_parts(tenant, id), 0, -1)) end
footprint.change(tenant, size, '')
if kind == 'job' then
  local state = redis.call('HGET', key.job(id), 'state')
  if state == 'queued' or state == 'running' then return 1 end -- submitted again in the meantime
  job_record.delete(id, tenant, batch ~= '' and batch)
elseif kind == 'file' then
  redis.call('DEL', key.file(tenant, id), key.file_parts(tenant, id))
  redis.call('ZREM', key.files(tenant), id)
elseif kind == 'adapter' then
  redis.call('DEL', key.adapter(tenant, id))
  redis.call('ZREM', key.adapters(tenant), id)
  redis.call('ZREM', key.all_adapters, tenant .. '|' .. id)
end
return 1
