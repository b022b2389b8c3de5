-- NEEDS sync_calls
-- RUNS when Redis is full
-- Record that a request waits for the object that it creates. Its parts are stored already: a full Redis does not refuse this.
-- args     tenant, digest, call
--          `call`: 'object process'
-- Returns  1
sync_calls.start(args.tenant, args.digest, args.call)
return 1
