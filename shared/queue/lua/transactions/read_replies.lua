-- Read for a decision of the caller, at one moment (`shared/queue/transactions.py`).
-- args     commands
--          `commands`: JSON list
-- Returns  the time in ms, and the reply to each command as JSON
local out = {clock_ms()}
for _, command in ipairs(cjson.decode(args.commands)) do
  table.insert(out, cjson.encode(redis.call(unpack(command)) or false))
end
return out
