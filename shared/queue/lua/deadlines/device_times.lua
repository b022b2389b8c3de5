-- Part of the scripts that queue, claim or end jobs: the device time that jobs of a signature take, for each denoising step and
-- for the rest (encoding, decoding), in ms. The mean orders jobs by slack; the least seen is a lower bound, by which they
-- expire.

local device_times = {}
local KNOWN_MS = 600000 -- or four jobs: what was learned counts for this time. If it is wrong, no job may run that corrects it.
local WINDOW_MS = 86400000 -- the least time falls at once, and rises when one to two windows have seen none as short
local LEAST_JOBS = 4 -- before the bound counts: the first forwards of a size are slow, as kernels are chosen or compiled
-- Jobs of a signature differ: guidance doubles the rows of an image, the pixels of a size class differ by 1.42, adapters and
-- long prompts cost more. The cheapest kind may not have been seen.
local BOUND_PART = 0.5
-- Of the hash slot_cost:<sig>, in the order of the names below. Older versions wrote `run_ms`, `step_ms` and `learned` of wall
-- time.
local FIELDS = {'device_step_ms', 'device_rest_ms', 'device_run_ms', 'least_step_ms', 'least_rest_ms', 'earlier_step_ms',
  'earlier_rest_ms', 'least_since', 'device_jobs', 'device_at'}
local NAMES = {'step', 'rest', 'run', 'least_step', 'least_rest', 'earlier_step', 'earlier_rest', 'since', 'jobs', 'at'}

-- Whether jobs have ended lately that confirm or correct what is known; not after the clock was set back by as much.
local function is_current(known, now)
  return known.at and math.abs(now - known.at) <= math.max(KNOWN_MS, 4 * known.run) or false
end

local function lesser(one, other) return one and other and math.min(one, other) or one or other end

-- What is known after a job: its mean times, and the least ones of a step and of the rest, each nil if it had none.
function device_times.after(known, job, now)
  local jobs = is_current(known, now) and known.jobs + 1 or 1
  local new = {jobs = jobs, at = now, since = known.since, least_step = known.least_step, least_rest = known.least_rest,
    earlier_step = known.earlier_step, earlier_rest = known.earlier_rest}
  for _, name in ipairs({'step', 'rest', 'run'}) do
    local mean = jobs > 1 and known[name] or job[name]
    new[name] = mean + math.max(0.1, 1 / jobs) * (job[name] - mean)
  end
  local age = known.since and now - known.since or math.huge
  if age > WINDOW_MS or age < 0 then
    local recent = age <= 2 * WINDOW_MS
    new.since, new.earlier_step, new.earlier_rest = now, recent and new.least_step or nil, recent and new.least_rest or nil
    new.least_step, new.least_rest = nil, nil
  end
  new.least_step, new.least_rest = lesser(new.least_step, job.least_step), lesser(new.least_rest, job.least_rest)
  return new
end

-- Mean ms of a job, of a step and of the rest; 0, nil and nil if no job has ended lately.
function device_times.means(known, now)
  if not is_current(known, now) then return 0 end
  return known.run, known.step, known.rest
end

-- The least ms that a job of so many steps takes on the devices that have run the signature; 0 if too little is known.
function device_times.bound(known, steps, now)
  if not is_current(known, now) or known.jobs < LEAST_JOBS then return 0 end
  local step, rest = lesser(known.least_step, known.earlier_step), lesser(known.least_rest, known.earlier_rest)
  return BOUND_PART * ((rest or 0) + (step or 0) * steps)
end

local TIMES = {'step', 'rest', 'run', 'least_step', 'least_rest'}
local read = {} -- by signature

-- What is known of a signature.
function device_times.of(sig)
  if not read[sig] then
    local values = redis.call('HMGET', key.slot_cost(sig), unpack(FIELDS))
    read[sig] = {}
    for at, name in ipairs(NAMES) do read[sig][name] = tonumber(values[at] or nil) end
    if not read[sig].run or not read[sig].jobs then read[sig] = {} end
  end
  return read[sig]
end

-- Learn from a job that succeeded. times: 'step rest run least_step least_rest', '-' for one it has not; '' without any.
function device_times.learn(sig, times, now)
  local job, at = {}, 0
  for value in string.gmatch(times, '%S+') do
    at = at + 1
    job[TIMES[at]] = tonumber(value)
  end
  if not job.run or job.run <= 0 then return end
  read[sig] = device_times.after(device_times.of(sig), job, now)
  local fields = {}
  for index, name in ipairs(NAMES) do
    local value = read[sig][name]
    table.insert(fields, FIELDS[index])
    table.insert(fields, value and string.format((name == 'at' or name == 'since') and '%.0f' or '%.6g', value) or '')
  end
  redis.call('HSET', key.slot_cost(sig), unpack(fields))
end
