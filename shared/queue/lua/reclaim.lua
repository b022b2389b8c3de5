-- NEEDS line ending
-- Take back the jobs whose lease ran out: to the front of their line, to run alone, or to the dead letters.
-- KEYS[1]  prefix
-- ARGV     how many at most
-- Returns  their ids
local now, out, touched = clock_ms(), {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.leases, '-inf', whole(now), 'LIMIT', 0, ARGV[1])) do
  local job = ending.load(id)
  if job and job.state == 'running' then
    ending.lost(id, job, now)
    touched[job.sig] = true
    table.insert(out, id)
  else
    redis.call('ZREM', key.leases, id)
  end
end
for sig in pairs(touched) do line.refresh(sig, now) end
if out[1] then line.wake() end
return out
