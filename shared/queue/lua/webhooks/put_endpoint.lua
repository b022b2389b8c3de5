-- NEEDS webhooks
-- Store or delete an endpoint of a tenant.
-- ARGV     tenant, endpoint_id, endpoint, max_endpoints, must_exist
--          `endpoint`: JSON, '' to delete it
-- Returns  'ok', 'none' or 'full'
local name, id = key.webhook_endpoints(ARGV[1]), ARGV[2]
local exists = redis.call('HEXISTS', name, id) == 1
if ARGV[3] == '' then
  if not exists then return 'none' end
  redis.call('HDEL', name, id)
else
  if ARGV[5] == '1' and not exists then return 'none' end
  if not exists then
    local count = 0
    for _, field in ipairs(redis.call('HKEYS', name)) do
      if string.sub(field, 1, 3) == 'we_' then count = count + 1 end
    end
    if count >= tonumber(ARGV[4]) then return 'full' end
  end
  redis.call('HSET', name, id, ARGV[3])
end
webhooks.refresh(ARGV[1])
return 'ok'
