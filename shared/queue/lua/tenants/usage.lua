-- NEEDS spending
-- Part of the scripts that end jobs or runs: what the jobs of each tenant and model have used, by day (UTC) of their end.
-- A row is a field 'tenant|model' of `usage`, in order also in `usage_rows`: the numbers of NAMES, separated by commas.

local usage = {}
local NAMES = {'succeeded', 'failed', 'canceled', 'expired', 'device_us', 'steps', 'skipped_steps', 'images', 'videos',
  'output_bytes'}
local DAY_MS = 86400000
-- Far more than a service has tenants and models. A row takes 230 bytes; those above the bound are counted as one.
local MAX_ROWS = 20000
local OTHERS = '*|*'

-- Add the numbers of NAMES, by name, to a tenant's row of today.
function usage.add(tenant, model, numbers, now)
  spending.add(tenant, numbers.device_us or 0, now)
  local day = math.floor(now / DAY_MS)
  local name, row = key.usage(whole(day)), tenant .. '|' .. (model or '*')
  local known = redis.call('HGET', name, row)
  if not known and redis.call('HLEN', name) >= MAX_ROWS then
    row = OTHERS
    known = redis.call('HGET', name, row)
  end
  local sums = {}
  for number in string.gmatch(known or '', '%d+') do table.insert(sums, tonumber(number)) end
  for at, field in ipairs(NAMES) do sums[at] = whole((sums[at] or 0) + (numbers[field] or 0)) end
  redis.call('HSET', name, row, table.concat(sums, ','))
  if known then return end
  redis.call('ZADD', key.usage_rows(whole(day)), 0, row)
  for _, own in ipairs({name, key.usage_rows(whole(day))}) do
    redis.call('PEXPIREAT', own, whole((day + 1) * DAY_MS + conf.usage_retention_ms))
  end
end

-- What a run has used, from the numbers that a worker sends; without its outputs if the client does not get them.
function usage.of_run(text, has_outputs)
  local run, at = {}, 4
  for number in string.gmatch(text, '%d+') do
    at = at + 1
    if at <= 7 or has_outputs then run[NAMES[at]] = tonumber(number) end
  end
  return run
end
