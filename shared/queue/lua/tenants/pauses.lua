-- Part of the scripts that choose jobs: what operators have paused. Its running jobs run on.

local pauses = {}
local known, any = {}, nil

local function is_paused(field)
  if any == nil then any = redis.call('EXISTS', key.pauses) == 1 end
  if not any then return false end
  if known[field] == nil then known[field] = redis.call('HEXISTS', key.pauses, field) == 1 end
  return known[field]
end

function pauses.has_model(name) return is_paused('all') or is_paused('model|' .. name) end
function pauses.has_tenant(name) return is_paused('tenant|' .. name) end

-- The models that are not paused.
function pauses.without(models)
  local rest = {}
  for _, model in ipairs(models) do if not pauses.has_model(model.name) then table.insert(rest, model) end end
  return rest
end
