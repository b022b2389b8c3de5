-- RUNS when Redis is full
-- Let a retry wait for the job of an earlier attempt: of those for which no request of a living process waits, the one with
-- the lowest score (see SyncCalls).
-- args     tenant, digest, process, waited_for
--          `waited_for`: 1 to join also a job for which a request waits
-- Returns  the job's id, '' when requests wait for all jobs, or false
local name = key.sync_calls(args.tenant, args.digest)
local calls, alive = redis.call('ZRANGE', name, 0, -1, 'WITHSCORES'), {[args.process] = true}

local function lives(process)
  if alive[process] == nil then alive[process] = redis.call('PUBSUB', 'NUMSUB', key.api_process(process))[2] > 0 end
  return alive[process]
end

for at = 1, #calls, 2 do
  local id, process = string.match(calls[at], '^(%S+) ?(.*)$')
  -- Below 0 when a request left twice.
  local retries = math.floor((tonumber(calls[at + 1]) + 500) / 1000)
  if args.waited_for or tonumber(calls[at + 1]) <= 1000 * retries or not lives(process) then
    redis.call('ZREM', name, calls[at])
    redis.call('ZADD', name, 1000 * (retries + 1) + 1, id .. ' ' .. args.process)
    redis.call('PEXPIRE', name, conf.sync_call_ms)
    return id
  end
end
return calls[1] and '', true
