-- NEEDS recount
-- Part of the scripts that create or delete what a tenant keeps: how much it is, in `footprint`, by tenant and in total ('*').
-- The size of an item is a text with the four numbers of NAMES, separated by commas; '' for nothing. It is kept with the item:
-- in a job's or input's hash, in its row of `retention`, which outlives the hash, and for a file in its list of parts.

local footprint = {}
local NAMES = {'kept_jobs', 'record_bytes', 'stored_objects', 'stored_bytes'}
-- What a job costs Redis besides its text: hash, indexes, lane entry, events. Measured: 2.7 KB with 0.7 KB of text.
local JOB_BYTES = 2000
-- What it costs besides in the two sorted sets of its group.
local GROUP_BYTES = 350
-- What it costs besides in the children of each of its parents. Measured: 147 bytes beside thousands of others, 210 alone.
local PARENT_BYTES = 200

-- The size of a job with the text `wire`, in a group or in none. Its text has the ids of its parents, and its own.
function footprint.of_job(wire, group, result_bytes, objects, bytes)
  local _, ids = string.gsub(wire, '"job_%w+"', '')
  local record_bytes = JOB_BYTES + #wire + result_bytes + PARENT_BYTES * math.max(0, ids - 1)
  if (group or '') ~= '' then record_bytes = record_bytes + GROUP_BYTES end
  return string.format('1,%.0f,%.0f,%.0f', record_bytes, objects, bytes)
end

function footprint.numbers(size)
  local numbers = {}
  for number in string.gmatch(size or '', '%d+') do table.insert(numbers, tonumber(number)) end
  for at = 1, #NAMES do numbers[at] = numbers[at] or 0 end
  return numbers
end

-- The size of an item of which one part is replaced by another.
function footprint.replaced(size, before, after)
  local sum, old, new = footprint.numbers(size), footprint.numbers(before), footprint.numbers(after)
  for at = 1, #NAMES do sum[at] = whole(math.max(0, sum[at] - old[at] + new[at])) end
  return table.concat(sum, ',')
end

local function add(owner, name, number)
  if number == 0 then return end
  if recount.in_progress() then recount.note(name .. '|' .. owner, number) end
  local field = owner .. '|' .. name
  if redis.call('HINCRBY', key.footprint, field, whole(number)) <= 0 then redis.call('HDEL', key.footprint, field) end
end

-- Add four numbers, which can be negative, to what a tenant keeps.
function footprint.add(tenant, numbers)
  for at, name in ipairs(NAMES) do
    add(tenant, name, numbers[at])
    add('*', name, numbers[at])
  end
end

-- Bytes of the checkpoints of all tenants, which `stored_bytes` has, too.
function footprint.checkpoint_bytes()
  return tonumber(redis.call('HGET', key.footprint, '*|checkpoint_bytes') or nil) or 0
end

function footprint.add_checkpoint(bytes) add('*', 'checkpoint_bytes', bytes) end

-- Replace the size of an item: '' before it exists, '' after it is deleted.
function footprint.change(tenant, before, after)
  if before == after then return end
  local old, new = footprint.numbers(before), footprint.numbers(after)
  for at = 1, #NAMES do new[at] = new[at] - old[at] end
  footprint.add(tenant, new)
end

-- What a tenant keeps and may keep: {used = four numbers, most = four numbers}.
function footprint.read(tenant)
  local fields = {}
  for at, name in ipairs(NAMES) do fields[at] = tenant .. '|' .. name end
  local used, own = redis.call('HMGET', key.footprint, unpack(fields)), redis.call('HMGET', key.tenant_limits, unpack(fields))
  local most = {conf.max_kept_jobs, conf.max_record_bytes, conf.max_stored_objects, conf.max_stored_bytes}
  local known = {used = {}, most = {}}
  for at = 1, #NAMES do
    known.used[at] = tonumber(used[at] or nil) or 0
    known.most[at] = tonumber(own[at] or nil) or most[at]
  end
  return known
end

-- The first quota that four more numbers exceed, or nil. of_job: the job adds its results later, so that no quota is used up.
function footprint.exceeded(known, more, of_job)
  for at, name in ipairs(NAMES) do
    local used = known.used[at] + more[at]
    if more[at] > 0 and used > known.most[at] or (of_job and more[at] == 0 and used >= known.most[at]) then return name end
  end
end

function footprint.count(known, more)
  for at = 1, #NAMES do known.used[at] = known.used[at] + more[at] end
end
