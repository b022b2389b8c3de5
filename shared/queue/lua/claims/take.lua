-- NEEDS job_record job_state claim_job last_claim model_loads bulk_share
-- RUNS when Redis is full
-- Claim chosen jobs of a signature, each if it is still queued as it was read and its tenant may start it, and record what
-- else was decided. For a job of a lane's stream that another worker has claimed meanwhile the next one of its lane is claimed.
-- args     worker, token, signature, hold, decision
--          `token`: as in read_order; `hold`: the worker holds or loads the model from now on; `decision`: JSON of
--          `Decision` in `shared/queue/order/decision.py`
-- Returns  {how many chosen jobs were not queued as they were read, for each claim {job id, wire form, signature, epoch,
--          1 if solo, ms queued, ms to its deadline | -1, ms to its latest start | -1, its checkpoint | ''}}
local worker, token, sig, decision, now = args.worker, args.token, args.signature, cjson.decode(args.decision), clock_ms()
local repeated = last_claim.repeated(worker, token)
if repeated then return {0, repeated} end
local model = redis.call('HGET', key.signature(sig), 'model')
if not model or pauses.has_model(model) then return {#decision.take, {}} end
local batch = claim_job.batch(worker, sig, model, now)
local changed = 0

-- The job of a row {id, epoch} if it is queued as it was read.
local function queued(row)
  local job = job_record.load(row[1])
  local waits = job and job.state == 'queued' and job.src ~= 'paused' and job.sig == sig
  if waits and (tonumber(job.epoch) or 0) == row[2] then return job end
  changed = changed + 1
end

for _, row in ipairs(decision.remove) do
  local job = queued(row)
  -- A later deadline can have been set since the job was read.
  local loses = job and claim_job.loses_place(job, now)
  if loses == 'expire' then
    job_state.expire(row[1], job, now)
  elseif loses == 'late' then
    job_state.become_late(row[1], job, now)
  end
end
-- Claim the first job of a lane's stream if it needs as many slots as the chosen one; returns whether it is claimed.
local function take_next(rank, tenant, slots)
  local entry = redis.call('XRANGE', key.lane(sig, rank, tenant), '-', '+', 'COUNT', 1)[1]
  local id = queue.value_of(entry, 'job')
  local job = id and job_record.load(id)
  if not job or job.state ~= 'queued' or job.entry ~= entry[1] or job.slots ~= slots then return false end
  if claim_job.loses_place(job, now) or not quota.allows(batch.limits, tenant, slots, id, rank) then return false end
  claim_job.take(batch, id, job)
  return true
end

local names = {}
for at, row in ipairs(decision.take) do names[at] = row[5] end
quota.learn(batch.limits, names)
for _, row in ipairs(decision.take) do
  local id, _, place, rank, tenant, slots = unpack(row)
  local job = queued(row)
  if job and quota.allows(batch.limits, job.tenant, job.slots, row[1], job.rank) then
    claim_job.take(batch, id, job)
  elseif not job and place == 'lane' and take_next(rank, tenant, slots) then
    changed = changed - 1
  end
end
for name, change in pairs({skip = claim_job.skip, held_up = claim_job.note_passed, wait_for = claim_job.wait_for}) do
  for _, row in ipairs(decision[name]) do
    local job = queued(row)
    if job then change(batch, row[1], job) end
  end
end
for _, id in ipairs(decision.overtaken_jobs) do
  if redis.call('HGET', key.job(id), 'state') == 'queued' then redis.call('HINCRBY', key.job(id), 'overtaken', 1) end
end
claim_job.count(batch)
local _, ready_at = queue.refresh(sig, now)
if batch.claims[1] then
  local had_turn = decision.overtakes.had_turn
  if had_turn ~= cjson.null then redis.call('HDEL', key.signature(sig), 'overtaken:' .. had_turn) end
  for _, row in ipairs(decision.overtakes.signatures) do
    local name = key.signature(row[1])
    if redis.call('EXISTS', name) == 1 then redis.call('HINCRBY', name, 'overtaken:' .. row[2], 1) end
  end
  wakeups.claimed(worker, sig, ready_at <= now)
  bulk_share.record(decision.bulk_models, batch, decision.bulk_growth)
  if args.hold then model_loads.hold(model, worker, now) end
end
last_claim.keep(worker, token, batch.claims)
return {changed, batch.claims}
