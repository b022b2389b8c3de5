-- NEEDS line ending
-- Delete the record of a job that has ended; its pictures are due for removal at once.
-- KEYS[1]  prefix
-- ARGV     job id
-- Returns  1, or 0 when there is no such job or it has not ended
local id = ARGV[1]
local job = ending.load(id)
if not job or job.state == 'queued' or job.state == 'running' then return 0 end
redis.call('DEL', key.job(id), key.dead_letter(id))
redis.call('ZREM', key.dead, id)
redis.call('ZREM', key.jobs(job.tenant), id)
if job.batch then redis.call('ZREM', key.batch(job.tenant, job.batch), id) end
redis.call('ZADD', key.retention, whole(clock_ms()), ending.row(job.tenant, id, job.batch))
return 1
