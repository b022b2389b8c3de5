-- Part of every script: key names (the mirror of shared/queue/redis_keys.py), the clock, and the decisions that are pure.
-- KEYS[1]  prefix of every key, "{fq:<namespace>}:". All keys share its hash tag, so scripts build the other names.
-- conf     settings, written above this text when the script is loaded.

local PREFIX = KEYS[1]
local RANKS = {[0] = 'interactive', [1] = 'standard', [2] = 'bulk'}
local key = {
  signatures = PREFIX .. 'signatures', pace = PREFIX .. 'pace', waiting = PREFIX .. 'waiting',
  service = PREFIX .. 'service', leases = PREFIX .. 'leases', holding = PREFIX .. 'holding',
  deadlines = PREFIX .. 'deadlines', events = PREFIX .. 'events', wakeup = PREFIX .. 'wakeup',
  retention = PREFIX .. 'retention', workers = PREFIX .. 'workers', dead = PREFIX .. 'dead',
  progress = PREFIX .. 'progress', auth = PREFIX .. 'auth', apikeys = PREFIX .. 'apikeys',
  url_secret = PREFIX .. 'url_secret', limits = PREFIX .. 'limits', running = PREFIX .. 'running',
  outbox = PREFIX .. 'outbox', backfills = PREFIX .. 'backfills', hook_hosts = PREFIX .. 'hook_hosts',
  start_s = PREFIX .. 'start_s',
}
function key.job(id) return PREFIX .. 'job:' .. id end
function key.lane(sig, rank, tenant) return PREFIX .. 'lane:' .. sig .. '|' .. RANKS[rank] .. '|' .. tenant end
function key.lanes(sig, rank) return PREFIX .. 'lanes:' .. sig .. '|' .. RANKS[rank] end
function key.front(sig) return PREFIX .. 'front:' .. sig end
function key.alone(sig) return PREFIX .. 'alone:' .. sig end
function key.sig(sig) return PREFIX .. 'sig:' .. sig end
function key.ripe(model, rank) return PREFIX .. 'ripe:' .. model .. '|' .. RANKS[rank] end
function key.rhythm(sig) return PREFIX .. 'rhythm:' .. sig end
function key.holders(model) return PREFIX .. 'holders:' .. model end
function key.paying(sig) return PREFIX .. 'paying:' .. sig end
function key.jobs(tenant) return PREFIX .. 'jobs:' .. tenant end
function key.batch(tenant, batch) return PREFIX .. 'batch:' .. tenant .. '|' .. batch end
function key.idem(tenant, digest) return PREFIX .. 'idem:' .. tenant .. '|' .. digest end
function key.previews(job) return PREFIX .. 'previews:' .. job end
function key.tries(tenant, digest) return PREFIX .. 'tries:' .. tenant .. '|' .. digest end
function key.input(tenant, id) return PREFIX .. 'input:' .. tenant .. '|' .. id end
function key.file(tenant, id) return PREFIX .. 'file:' .. tenant .. '|' .. id end
function key.parts(tenant, id) return PREFIX .. 'parts:' .. tenant .. '|' .. id end
function key.files(tenant) return PREFIX .. 'files:' .. tenant end
function key.backfill(tenant, batch) return PREFIX .. 'backfill:' .. tenant .. '|' .. batch end
function key.taken(tenant, batch) return PREFIX .. 'taken:' .. tenant .. '|' .. batch end
function key.batches(tenant) return PREFIX .. 'batches:' .. tenant end
function key.videos(tenant) return PREFIX .. 'videos:' .. tenant end
function key.worker(worker) return PREFIX .. 'worker:' .. worker end
function key.curve(device, model, shape) return PREFIX .. 'curve:' .. device .. '|' .. model .. '|' .. shape end
function key.cost(name) return PREFIX .. 'cost:' .. name end
function key.learned(model, shape) return PREFIX .. 'learned:' .. model .. '|' .. shape end
function key.dead_letter(letter) return PREFIX .. 'dead:' .. letter end
function key.apikey(id) return PREFIX .. 'apikey:' .. id end
function key.rate(tenant) return PREFIX .. 'rate:' .. tenant end
function key.hooks(tenant) return PREFIX .. 'hooks:' .. tenant end
function key.hook_due(host) return PREFIX .. 'hook_due:' .. host end
function key.delivery(id) return PREFIX .. 'delivery:' .. id end
function key.deliveries(tenant) return PREFIX .. 'deliveries:' .. tenant end
function key.held(tenant) return PREFIX .. 'held:' .. tenant end

-- Lua would write a large number as 1.76e+12.
local function whole(number) return string.format('%.0f', number) end

local function clock_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function stream_ms(entry) return tonumber(string.match(entry, '^(%d+)-')) end

local rhythm = {}

-- The expected gap between arrivals of a signature, given the one expected so far and the time since the last arrival.
-- nil: nothing is known (a first arrival), or a long silence made what was known stale.
function rhythm.next_gap(gap, since, window)
  if not since or since > 10 * window then return nil end
  if not gap then return since end
  return gap + 0.3 * (since - gap)
end

-- When the waiting jobs of one signature and priority may start a batch (ms).
-- s.now; s.oldest: arrival of the oldest; s.returned: since when one was given back, or nil; s.seats: waiting in all
-- priorities; s.paying: seats that pay at once; s.window: ms a job may wait for company; s.gap: as next_gap tells it.
function rhythm.ripe_at(s)
  local at = math.huge
  if s.oldest then
    at = s.oldest + s.window
    if not s.gap or s.gap > s.window then at = s.oldest end
  end
  if s.seats >= s.paying then at = math.min(at, s.now) end
  if s.returned then at = math.min(at, s.returned) end
  return at
end
