-- Part of every script, after the settings (`conf`) and the key names (`PREFIX`, `RANKS`, `key`) that the loader writes.
-- KEYS[1] is the prefix of all keys in every script; they share its hash tag, so scripts build the other names.

-- Format without an exponent: Lua would write 1.76e+12.
local function whole(number) return string.format('%.0f', number) end

local function clock_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function stream_ms(entry) return tonumber(string.match(entry, '^(%d+)-')) end
