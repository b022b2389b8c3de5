-- Part of submit and start_sync_call: jobs of a tenant for which a request waits, by the digest of the request (see SyncCalls).

local sync_calls = {}

-- Record that a request waits for the job, or the other object, that it creates; `call`: 'job process'.
function sync_calls.start(tenant, digest, call)
  local name = key.sync_calls(tenant, digest)
  redis.call('ZADD', name, 'NX', 1, call) -- sent again, it does not undo a retry's join
  redis.call('ZREMRANGEBYRANK', name, conf.max_sync_calls, -1)
  redis.call('PEXPIRE', name, conf.sync_call_ms)
end
