-- NEEDS pauses
-- Part of the scripts that queue jobs: a wake-up goes to one waiting worker, which claims, waits until the jobs are ready, or
-- passes the wake-up on. Waiting workers are listed by topic: `running` a signature with free slots, idle for `any` job of a
-- model, or full and waiting for `interactive` jobs of a model. waiting:<worker> says which lists are current.

local wakeups = {}
local POPS = 32
local MAX_HANDOVERS = 2
local KEPT_MS = 10000
local LISTED_MS = 60000
local SILENT_MS = 3000 -- six heartbeats
local OVERDUE_MS, AGAIN_MS, AGAIN_SILENT_MS = 500, 1000, 1500
local OVERDUE_READ = 4
local CLASS = 10000000000000
local noted = {}

-- Whether a worker still sends heartbeats; true for one without any.
local function alive(worker, silent_ms)
  local beat = redis.call('ZSCORE', key.workers, worker)
  return not beat or tonumber(beat) >= clock_ms() - silent_ms
end

-- Take the worker that waits first for a topic.
local function take(kind, name, silent_ms)
  local topic = key.waiting_workers(kind, name)
  local wanted = kind == 'any' and 'any' or 'busy'
  if kind == 'running' then wanted = 'busy ' .. name end
  for _ = 1, POPS do
    local worker = redis.call('ZPOPMIN', topic)[1]
    if not worker then return nil end
    local state = redis.call('GET', key.waiting(worker))
    if state and string.sub(state, 1, #wanted) == wanted then
      redis.call('DEL', key.waiting(worker))
      if alive(worker, silent_ms) then return worker end
    end
  end
end

-- Wake a worker for the queued jobs of a signature, if one waits; return whether one does. `handovers`: how many workers
-- could not use this wake-up.
function wakeups.wake(sig, handovers, silent_ms)
  local silent = silent_ms or SILENT_MS
  local state = redis.call('HMGET', key.signature(sig), 'model', 'jobs:0')
  if not state[1] or pauses.has_model(state[1]) then return end
  local interactive = (tonumber(state[2] or nil) or 0) > 0
  local worker = take('running', sig, silent) or take('any', state[1], silent)
    or (interactive and take('interactive', state[1], silent))
  if not worker then return end
  redis.call('RPUSH', key.wakeup(worker), handovers .. ' ' .. sig)
  redis.call('PEXPIRE', key.wakeup(worker), KEPT_MS)
  return true
end

-- Whether jobs of a signature are ready.
local function is_ready(sig, now)
  local model = redis.call('HGET', key.signature(sig), 'model')
  for rank = 0, 2 do
    local at = model and redis.call('ZSCORE', key.ready(model, rank), sig)
    if at and tonumber(at) <= now then return true end
  end
  return false
end

function wakeups.is_queued(sig)
  for _, jobs in ipairs(redis.call('HMGET', key.signature(sig), 'jobs:0', 'jobs:1', 'jobs:2')) do
    if (tonumber(jobs or nil) or 0) > 0 then return true end
  end
  return false
end

-- Note a signature with queued jobs, for `wake_noted`.
function wakeups.note(sig) noted[sig] = true end

-- Wake a worker for each noted signature.
function wakeups.wake_noted()
  for sig in pairs(noted) do wakeups.wake(sig, 0) end
  noted = {}
end

-- Wake a worker for the jobs of a model that are overdue: the first one has got no wake-up, or could not use it.
local function wake_overdue(model, now)
  for rank = 0, 2 do
    local name, last = key.ready(model, rank), whole(now - OVERDUE_MS)
    for _, sig in ipairs(redis.call('ZRANGEBYSCORE', name, '-inf', last, 'LIMIT', 0, OVERDUE_READ)) do
      if wakeups.wake(sig, MAX_HANDOVERS, AGAIN_SILENT_MS) then return end
    end
  end
end

-- Once a second, wake a worker for each of these models, one a line, that has overdue jobs. Returns whether it was time. Not
-- by a TTL, which a step of the clock makes longer.
function wakeups.wake_again(models, digest, now)
  local name = key.woken_again(digest)
  local last = tonumber(redis.call('GET', name) or nil)
  if last and last <= now and now - last < AGAIN_MS then return false end
  redis.call('SET', name, whole(now), 'PX', AGAIN_MS)
  for model in string.gmatch(models, '[^\n]+') do wake_overdue(model, now) end
  return true
end

-- A worker has claimed jobs: it waits no more, and another is woken for what is left if it is ready.
function wakeups.claimed(worker, sig, ready)
  redis.call('DEL', key.waiting(worker))
  if ready then wakeups.wake(sig, 0) end
end

-- Pass wake-ups on, one a line, that an `idle` or a busy worker could not use. Returns those that an idle one keeps, as the
-- jobs are not ready: it claims them then, or passes them on when it is busy.
function wakeups.pass_on(lines, idle, now)
  local kept, known = {}, {}
  for wakeup in string.gmatch(lines, '[^\n]+') do
    local handovers, sig = string.match(wakeup, '^(%d+) (.*)$')
    if sig and not known[sig] and wakeups.is_queued(sig) then
      if idle and not is_ready(sig, now) then
        table.insert(kept, wakeup)
      elseif tonumber(handovers) < MAX_HANDOVERS then
        wakeups.wake(sig, tonumber(handovers) + 1)
      end
      known[sig] = true
    end
  end
  return kept
end

-- List a waiting worker, after those of a lower class. Returns how many wait.
function wakeups.list(kind, name, worker, class, now)
  local topic, first = key.waiting_workers(kind, name), class * CLASS
  redis.call('ZADD', topic, whole(first + now), worker)
  redis.call('ZREMRANGEBYSCORE', topic, whole(first), whole(first + now - LISTED_MS))
  redis.call('PEXPIRE', topic, LISTED_MS)
  return redis.call('ZCARD', topic)
end
