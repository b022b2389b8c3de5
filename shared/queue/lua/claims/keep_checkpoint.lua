-- NEEDS job_record job_state
-- RUNS when Redis is full
-- Name the checkpoint of a running job in its record, instead of an earlier one, if the claim is still this worker's.
-- A job that a worker lost may have batch mates again in its next run if the checkpoint is beyond the step of that loss.
-- args     worker, job_id, epoch, checkpoint, size, step, left
--          `checkpoint`: its text, none to forget the earlier one; `size`: of its objects, as in footprint;
--          `step`: steps of all images that it spares; `left`: the part of the job's steps that it leaves
-- Returns  'kept', 'stale' if the claim is no longer this worker's, 'full' if the checkpoints of all tenants would have more
--          bytes than they may, or the name of the quota of the tenant that it exceeds
local id = args.job_id
local job = job_record.load(id)
if not job or job.state ~= 'running' or job.worker ~= args.worker or tonumber(job.epoch) ~= args.epoch then return 'stale' end
local more, before = footprint.numbers(args.size), footprint.numbers(job.checkpoint_size)
for at = 1, #more do more[at] = more[at] - before[at] end
local quota = footprint.exceeded(footprint.read(job.tenant), more)
if quota then return quota end
if more[4] > 0 and footprint.checkpoint_bytes() + more[4] > conf.max_checkpoint_bytes then return 'full' end
job_record.set_checkpoint(id, job, args.checkpoint, args.size, args.left)
job_state.note_passed_step(id, job, args.step)
return 'kept'
