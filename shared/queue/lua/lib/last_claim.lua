-- NEEDS job_record
-- Part of read_order and take: the last claims of each worker, for a request that is sent again after a lost reply.

local last_claim = {}

-- The reply to an earlier request of the worker with the same token: the claims that are still its own. Nil without one.
function last_claim.repeated(worker, token)
  local kept = redis.call('GET', key.last_claim(worker))
  if not kept then return nil end
  local request = cjson.decode(kept)
  if request.token ~= token then
    redis.call('DEL', key.last_claim(worker))
    return nil
  end
  local rows = {}
  for _, claim in ipairs(request.claims) do
    local job = job_record.load(claim.id)
    if job and job.state == 'running' and job.worker == worker and tonumber(job.epoch) == claim.epoch then
      table.insert(rows, job_record.claimed(claim.id, job, claim.epoch, claim.waited, clock_ms()))
    end
  end
  return rows
end

-- Keep the claims of a request as long as their leases: later the jobs are queued again.
function last_claim.keep(worker, token, rows)
  if not rows[1] then return end
  local claims = {}
  for at, row in ipairs(rows) do claims[at] = {id = row[1], epoch = row[4], waited = row[6]} end
  redis.call('SET', key.last_claim(worker), cjson.encode({token = token, claims = claims}), 'PX', whole(conf.lease_ms))
end
