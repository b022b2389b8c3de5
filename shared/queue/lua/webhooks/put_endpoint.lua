-- NEEDS webhooks
-- Store or delete an endpoint of a tenant, or the secrets for the URLs of its jobs.
-- args     tenant, endpoint_id, before, after, max_endpoints
--          `before`: the JSON that this replaces, none for a new one; `after`: JSON, none to delete any
-- Returns  'ok', 'none', 'changed' (another JSON is stored) or 'full'
local name, id, before, after = key.webhook_endpoints(args.tenant), args.endpoint_id, args.before, args.after
local stored = redis.call('HGET', name, id)
if not after then
  if not stored then return 'none' end
  redis.call('HDEL', name, id)
elseif stored == after then
  return 'ok' -- repeated
else
  if stored and stored ~= before then return 'changed' end
  if not stored and before then return 'none' end
  if not stored then
    local count = 0
    for _, field in ipairs(redis.call('HKEYS', name)) do
      if string.sub(field, 1, 3) == 'we_' then count = count + 1 end
    end
    if count >= args.max_endpoints then return 'full' end
  end
  redis.call('HSET', name, id, after)
end
webhooks.refresh(args.tenant)
return 'ok'
