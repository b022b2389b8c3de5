-- NEEDS line ending
-- Delete a dead letter and its job's record; the job's pictures are due for removal at once.
-- KEYS[1]  prefix
-- ARGV     dead letter id
-- Returns  1, or 0 when there is no such dead letter
local id = ARGV[1]
if redis.call('ZREM', key.dead, id) == 0 then return 0 end
redis.call('DEL', key.dead_letter(id))
local job = ending.load(id)
if job and job.state ~= 'queued' and job.state ~= 'running' then
  redis.call('DEL', key.job(id))
  redis.call('ZREM', key.jobs(job.tenant), id)
  redis.call('ZREM', key.videos(job.tenant), id)
  if job.batch then redis.call('ZREM', key.batch(job.tenant, job.batch), id) end
  redis.call('ZADD', key.retention, whole(clock_ms()), ending.row(job.tenant, id, job.batch))
end
return 1
