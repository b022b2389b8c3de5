-- NEEDS line ending quota filling
-- Start a batch: choose one ripe signature and claim up to some seats of it.
-- KEYS[1]  prefix
-- ARGV     worker, seats, lowest rank that may be claimed, 1 if the worker runs other jobs, then the models
-- Returns  for each claim {job id, wire form, signature, epoch, 1 if alone, waited ms}
local worker, seats, lowest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = clock_ms()
local TRIES, EACH = 16, 4

-- Ripe signatures: by priority, then by how long they have been ripe.
local function candidates()
  local order, seen = {}, {}
  for rank = 0, lowest do
    local ripe = {}
    for at = 5, #ARGV do
      local found = redis.call('ZRANGEBYSCORE', key.ripe(ARGV[at], rank), '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, EACH)
      for row = 1, #found, 2 do table.insert(ripe, {sig = found[row], at = tonumber(found[row + 1])}) end
    end
    table.sort(ripe, function(a, b)
      if a.at ~= b.at then return a.at < b.at end
      return a.sig < b.sig
    end)
    for _, one in ipairs(ripe) do
      if not seen[one.sig] then
        seen[one.sig] = true
        table.insert(order, one.sig)
      end
    end
  end
  return order
end

for try, sig in ipairs(candidates()) do
  if try > TRIES then break end
  local b = {sig = sig, worker = worker, left = seats, lowest = lowest, now = now, starting = true,
    accompanied = ARGV[4] == '1'}
  local claims = filling.fill(b)
  -- Held: seats of this worker are to come free for a large job of that signature.
  if claims[1] or b.held then return claims end
end
return {}
