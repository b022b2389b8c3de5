-- Note that a request waits for its job no more.
-- KEYS[1]  prefix
-- ARGV     tenant, digest of the body, job
-- Returns  the job's score then, or false where its answer has been delivered
local name = key.tries(ARGV[1], ARGV[2])
local score = redis.call('ZSCORE', name, ARGV[3])
if not score then return false end
if tonumber(score) % 1000 == 0 then return whole(tonumber(score)) end
return whole(tonumber(redis.call('ZINCRBY', name, -1, ARGV[3])))
