-- NEEDS job_record
-- RUNS when Redis is full
-- Delete a dead letter and its job's record; the job's objects are due for deletion at once.
-- args     letter_id
-- Returns  1, or 0 for an unknown dead letter
local id = args.letter_id
if redis.call('ZREM', key.dead_letters, id) == 0 then return 0 end
redis.call('DEL', key.dead_letter(id))
local job = job_record.load(id)
if job and job.state ~= 'queued' and job.state ~= 'running' then job_record.forget(id, job, clock_ms()) end
return 1
