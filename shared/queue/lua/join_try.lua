-- Let a retry wait for the job of an earlier try: for the one that fewest have come back for, of these the one that
-- nobody waits for, of these the oldest.
-- KEYS[1]  prefix
-- ARGV     tenant, digest of the body, ms that the tries are kept
-- Returns  the job's id, or false
local name = key.tries(ARGV[1], ARGV[2])
local found = redis.call('ZRANGE', name, 0, 0)
if not found[1] then return false end
redis.call('ZINCRBY', name, 1001, found[1])
redis.call('PEXPIRE', name, ARGV[3])
return found[1]
