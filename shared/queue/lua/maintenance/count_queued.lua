-- RUNS when Redis is full
-- Count the queued jobs of signatures, in pages; remove released, lost and dated jobs that are not queued.
-- args     section, cursor, signatures...
--          `section`, `cursor`: where to continue in the first signature; both 0 at its beginning
-- Returns  {signatures completed, section, cursor, rows 'signature, priority, tenant, lane or job, jobs'}
local MANY, PAGE = 300, 100
local FRONT, SOLO, DATED = 3, 4, 5 -- sections after the lanes of each rank
local done, section, cursor, rows = 0, args.section, args.cursor, {}

local function read_lanes(sig, rank)
  local page = redis.call('ZSCAN', key.lanes(sig, rank), cursor, 'COUNT', PAGE)
  for at = 1, #page[2], 2 do
    local tenant = page[2][at]
    table.insert(rows, {sig, rank, tenant, tenant, redis.call('XLEN', key.lane(sig, rank, tenant))})
  end
  return page[1]
end

local function read_jobs(sig, name)
  local page = redis.call('ZSCAN', name, cursor, 'COUNT', PAGE)
  for at = 1, #page[2], 2 do
    local id = page[2][at]
    local job = redis.call('HMGET', key.job(id), 'state', 'src', 'rank', 'tenant')
    local rank, tenant = tonumber(job[3] or nil), job[4]
    if job[1] == 'queued' and job[2] ~= 'lane' and rank and tenant then
      table.insert(rows, {sig, rank, tenant, name .. id, 1})
    else
      redis.call('ZREM', name, id)
      if rank and tenant then redis.call('ZREM', key.returned(sig, rank, tenant), id) end
    end
  end
  return page[1]
end

while done < #args.signatures and #rows < MANY do
  local sig = args.signatures[done + 1]
  if section < FRONT then
    cursor = read_lanes(sig, section)
  else
    local names = {[FRONT] = key.front(sig), [SOLO] = key.solo(sig), [DATED] = key.dated(sig)}
    cursor = read_jobs(sig, names[section])
  end
  if cursor == '0' then
    done, section = section == DATED and done + 1 or done, (section + 1) % (DATED + 1)
  end
end
return {done, section, cursor, rows}
