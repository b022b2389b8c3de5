-- NEEDS sync_calls
-- RUNS when Redis is full
-- Record that a request waits for the object that it creates. Its parts are stored already: a full Redis does not refuse this.
-- ARGV     tenant, digest, call
--          `call`: 'object process'
-- Returns  1
sync_calls.start(ARGV[1], ARGV[2], ARGV[3])
return 1
