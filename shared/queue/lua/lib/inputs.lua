-- Part of the scripts that queue or end jobs: how many jobs use an input image or an uploaded adapter.

local inputs = {}

local function is_adapter(id) return string.sub(id, 1, 8) == 'adapter_' end

-- Change by `amount` how many jobs use an uploaded adapter; false for an id of an input image. Adapters are kept until
-- deleted.
local function count_adapter_use(tenant, id, amount)
  if not is_adapter(id) then return false end
  local name = key.adapter(tenant, id)
  if redis.call('EXISTS', name) == 1 and redis.call('HINCRBY', name, 'live', amount) < 0 then
    redis.call('HSET', name, 'live', 0)
  end
  return true
end

-- Release one input image or adapter of a job; an image that is unused is kept for its own retention or as long as the job, if
-- that is longer.
function inputs.release(tenant, input, now, job_ms)
  if count_adapter_use(tenant, input, -1) then return end
  local keep = math.max(conf.input_retention_ms, job_ms)
  local name = key.input(tenant, input)
  if redis.call('HINCRBY', name, 'live', -1) > 0 then return end
  redis.call('HSET', name, 'live', 0)
  redis.call('PEXPIRE', name, whole(keep))
  local stored = redis.call('HMGET', name, 'object', 'size')
  if not stored[1] then return end -- deleted before the job: its object has a row already or is deleted
  redis.call('ZADD', key.retention, whole(now + keep + 60000),
    'input|' .. tenant .. '|' .. input .. '|' .. stored[1] .. '|' .. (stored[2] or ''))
end

-- The ids in `uses`, and the first of them that has been deleted, or nil. `uses` has adapters as 'id' and input images as
-- 'id|object', separated by spaces: an image that is uploaded again after its deletion is another object.
function inputs.find(tenant, uses)
  local ids, deleted = {}, nil
  for id, object in string.gmatch(uses, '([^%s|]+)|?(%S*)') do
    local is_there
    if is_adapter(id) then
      is_there = redis.call('HEXISTS', key.adapter(tenant, id), 'record') == 1
    else
      is_there = redis.call('HGET', key.input(tenant, id), 'object') == object
    end
    deleted = deleted or not is_there and id or nil
    table.insert(ids, id)
  end
  return table.concat(ids, ' '), deleted
end

-- Keep the input images and adapters with these ids (separated by spaces) as long as the job needs them.
function inputs.hold(tenant, inputs)
  for input in string.gmatch(inputs, '%S+') do
    if not count_adapter_use(tenant, input, 1) then
      local name = key.input(tenant, input)
      redis.call('HINCRBY', name, 'live', 1)
      redis.call('PERSIST', name)
    end
  end
end
