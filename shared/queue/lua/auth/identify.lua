-- An API key and the limits of its tenant.
-- args     key_id, default_tenant
-- Returns  {1 if a key has ever been created, fields and values of the key, 1 if it has expired,
--          {requests per minute, queued jobs, running slots; '' without a limit of this tenant}}
local fields = args.key_id and redis.call('HGETALL', key.api_key(args.key_id)) or {}
local tenant, expired = args.default_tenant, 0
for at = 1, #fields, 2 do
  if fields[at] == 'tenant' then tenant = fields[at + 1] end
  if fields[at] == 'expires' and tonumber(fields[at + 1]) <= clock_ms() then expired = 1 end
end
local set = redis.call('HMGET', key.tenant_limits, tenant .. '|requests_per_minute', tenant .. '|queued_jobs',
  tenant .. '|running_slots')
for at = 1, 3 do set[at] = set[at] or '' end
return {redis.call('EXISTS', key.keys_created), fields, expired, set}
