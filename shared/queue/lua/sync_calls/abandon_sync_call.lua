-- RUNS when Redis is full
-- Remove a job from its synchronous calls unless a request has joined it.
-- args     tenant, digest, call, score
--          `call`: 'job process'
-- Returns  1, or 0 when requests have joined since
local name = key.sync_calls(args.tenant, args.digest)
if tonumber(redis.call('ZSCORE', name, args.call)) ~= args.score then return 0 end
return redis.call('ZREM', name, args.call)
