// The service at a glance, read every few seconds while the page is visible and has its key: queues, workers, jobs that
// run or ended.

import { call, serverNow, withQuery } from "./api.js";
import { ended, quantile } from "./format.js";
import { createStore } from "./hooks.js";
import { follow, live, onEnd, readJobs } from "./live.js";
import { may, mayOperate, mayRead, session } from "./session.js";

const WATCHED_MS = 2_000;
const UNWATCHED_MS = 6_000; // only the numbers beside the navigation and the pauses are visible
const SAMPLES = 300; // ten minutes
const WINDOW_MS = 10_000; // of rates
const WAITS_MS = 60_000;
const EARLIER_MS = 300_000;
const EVERY_MS = 5_000; // of those from before the page was opened
const MOST_FINISHED = 2_000;
const MOST_PAGES = 5;
const SCAN_EVERY_MS = 6_000; // a list by state reads up to 1,000 jobs

const empty = () => ({
  at: 0,
  error: null,
  queues: null,
  workers: null,
  scale: null,
  pauses: null,
  running: [],
  recent: [],
  samples: [],
});

export const overview = createStore(empty());

let finished = new Map(); // id -> job that has ended
let counters = new Map(); // id of a worker -> its counters at the last change
let timer = 0;
let unfollow = () => {};
let followedIds = "";
let scannedAt = 0;
let searchedAt = 0;
let frontier = ""; // with jobs queued: the last one of those that have all ended, from the oldest on
let watchers = 0; // views that show the figures
let reading = null; // aborts the read in progress: two could end in another order
let isAskedAgain = false;

/** Begin to read; returns a function that stops it and forgets what was read: another key can be another tenant's. */
export function startOverview() {
  if (!reading) read();
  return () => {
    clearTimeout(timer);
    reading?.abort();
    reading = null;
    finished = new Map();
    counters = new Map();
    unfollow();
    followedIds = "";
    frontier = "";
    unfollow = () => {};
    overview.set(empty());
  };
}

/** Read often; returns a function that stops it. */
export function watchOverview() {
  watchers += 1;
  refresh();
  return () => void (watchers -= 1);
}

/** Read now, for example after an action; again after the read in progress, which can be of before the action. */
export function refresh() {
  if (reading) isAskedAgain = true;
  else read();
}

document.addEventListener("visibilitychange", () => document.hidden || refresh());
onEnd((job) => keep(job));

async function read() {
  clearTimeout(timer);
  if (document.hidden || session.value.state !== "open") return;
  const mine = (reading = new AbortController());
  isAskedAgain = false;
  try {
    overview.set(await readAll(mine.signal));
  } catch (error) {
    if (!mine.signal.aborted) overview.set({ ...overview.value, error });
  }
  if (mine.signal.aborted) return;
  reading = null;
  const isFirst = overview.value.samples.length < 2; // rates need two
  if (isAskedAgain) read();
  else timer = setTimeout(read, isFirst ? 700 : watchers ? WATCHED_MS : UNWATCHED_MS);
}

async function readAll(signal) {
  const optional = (allowed, path) => (allowed ? call(path, { signal }) : Promise.resolve(null));
  const [queues, workers, pauses, scale] = await Promise.all([
    optional(mayOperate(), "v1/queues"),
    optional(mayOperate(), "v1/workers"),
    optional(mayOperate(), "v1/pauses"),
    optional(may("metrics") || mayOperate(), `v1/scale/${encodeURIComponent(session.value.namespace)}`),
  ]);
  const jobs = mayRead() ? await recentJobs(queues?.data ?? null, workers?.data ?? null, signal) : [];
  signal.throwIfAborted();
  for (const job of jobs) {
    if (ended(job.status)) keep(job);
    else if (!hasEnded(job)) finished.delete(job.id); // it was redriven
  }
  const running = jobs.filter((job) => job.status === "running" && !hasEnded(job));
  running.sort((one, other) => (one.created_at < other.created_at ? -1 : 1)); // rows stay where they are
  followRunning(running);
  const now = serverNow();
  const sample = { ...figures(now), ...depths(queues?.data, workers?.data, running) };
  const samples = overview.value.samples.length ? overview.value.samples : earlier(now);
  return {
    at: now,
    error: null,
    queues: queues?.data ?? null,
    workers: workers?.data ?? null,
    pauses: pauses?.data ?? null,
    scale,
    running,
    recent: newest(),
    samples: [...samples.slice(1 - SAMPLES), sample],
  };
}

/**
 * Jobs that run or have ended lately. With thousands queued the newest are all queued, so those around the oldest
 * queued one are read too; what runs although it is newer (of a higher priority) is among the newest, or found by its
 * state.
 */
async function recentJobs(queues, workers, signal) {
  const oldest = Math.max(0, ...(queues ?? []).map((queue) => queue.oldest_age_ms ?? 0));
  const latest = (await readJobs("v1/jobs?limit=50", { signal })).data;
  if (latest.length < 50 || !latest.every((job) => job.status === "queued")) frontier = "";
  const isFull = latest.length === 50 && (oldest || latest.every((job) => job.status === "queued"));
  const around = isFull ? await aroundFrontier(oldest, signal) : [];
  const found = new Map([...latest, ...around].map((job) => [job.id, job]));
  const expected = workers?.reduce((sum, worker) => sum + worker.running_jobs, 0) ?? 1;
  const runs = [...found.values()].filter((job) => job.status === "running").length;
  if (runs < expected && Date.now() - scannedAt > SCAN_EVERY_MS && found.size >= 50) {
    scannedAt = Date.now();
    const list = await readJobs(
      withQuery("v1/jobs", { status: "running", limit: Math.min(100, workers ? expected : 100) }),
      { signal },
    );
    for (const job of list.data) found.set(job.id, job);
  }
  return [...found.values()];
}

/** Jobs around the oldest queued one, which is `oldest` ms old, or 0 if that is not known. */
async function aroundFrontier(oldest, signal) {
  const before = oldest ? new Date(serverNow() - oldest - 1_000).toISOString() : "";
  const jobs = frontier ? [] : await beforeFrontier(before, signal);
  frontier ||= jobs.find((job) => ended(job.status))?.id ?? "";
  let from = frontier ? { after: frontier } : { created_after: before }; // the first jobs of all
  let isPassed = false;
  for (let pages = 0; (from.after || from.created_after) && pages < MOST_PAGES; pages += 1) {
    const { data, has_more } = await readJobs(withQuery("v1/jobs", { order: "asc", limit: 100, ...from }), { signal });
    for (const job of data) {
      isPassed ||= !ended(job.status);
      if (!isPassed) frontier = job.id;
    }
    jobs.push(...data);
    from = { after: data.at(-1)?.id };
    if (!has_more || data.some((job) => job.status === "queued")) break;
  }
  return jobs;
}

/** The newest jobs created before a time; without one, those that have ended, looked for by their state. */
async function beforeFrontier(before, signal) {
  if (before) return (await readJobs(withQuery("v1/jobs", { created_before: before, limit: 100 }), { signal })).data;
  if (Date.now() - searchedAt < SCAN_EVERY_MS) return [];
  searchedAt = Date.now();
  const query = { status: "succeeded,failed,canceled,expired", limit: 100 };
  for (let pages = 0; ; pages += 1) {
    const { data, has_more, next_cursor } = await readJobs(withQuery("v1/jobs", query), { signal });
    if (data.length || !has_more || pages === MOST_PAGES) return data;
    query.after = next_cursor;
  }
}

const hasEnded = (job) => live.value.jobs.get(job.id)?.job !== undefined; // since it was read

function followRunning(running) {
  const ids = running.slice(0, 64).map((job) => job.id);
  const text = ids.toSorted().join(",");
  if (text === followedIds) return;
  const before = unfollow;
  followedIds = text;
  unfollow = follow(ids);
  before();
}

function keep(job) {
  finished.delete(job.id);
  finished.set(job.id, job);
  for (const id of finished.keys()) {
    if (finished.size <= MOST_FINISHED) break;
    finished.delete(id);
  }
}

const newest = () =>
  [...finished.values()]
    .filter((job) => job.finished_at)
    .sort((a, b) => (a.finished_at < b.finished_at ? 1 : -1))
    .slice(0, 24);

/** Samples from before the page was opened, as far as the jobs say. */
function earlier(now) {
  const ends = [...finished.values()].map((job) => Date.parse(job.finished_at)).filter((at) => now - at < EARLIER_MS);
  const begin = Math.min(...ends);
  const samples = [];
  for (let at = now - EVERY_MS; at > begin; at -= EVERY_MS) samples.unshift(figures(at));
  return samples;
}

/** Images per second and waits at a time. */
function figures(now) {
  let images = 0;
  const waits = [];
  for (const job of finished.values()) {
    const age = job.finished_at ? now - Date.parse(job.finished_at) : Infinity;
    if (age < 0) continue;
    if (age < WINDOW_MS && job.status === "succeeded") images += job.artifacts.length;
    if (age < WAITS_MS && job.metrics.queue_ms !== null) waits.push(job.metrics.queue_ms);
  }
  waits.sort((a, b) => a - b);
  return { at: now, images: images / (WINDOW_MS / 1_000), p50: quantile(waits, 0.5), p95: quantile(waits, 0.95) };
}

/** Slots queued and running now, and what the engines have done since the last sample. */
function depths(queues, workers, running) {
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  return {
    queued: queues ? total(queues.map((queue) => total(Object.values(queue.slots)))) : null,
    running: workers ? total(workers.map((worker) => worker.running_slots)) : total(running.map((job) => job.n)),
    ...(workers ? engine(workers) : { fill: null, busy: null, steps: null }),
  };
}

/** Batch fill, busy share and steps per second since the last sample, from the workers' counters. */
function engine(workers) {
  const sum = { rows: 0, capacity: 0, busy: 0, seconds: 0, rate: 0 };
  for (const worker of workers) {
    const before = counters.get(worker.id);
    counters.set(worker.id, worker);
    if (!before || worker.beat_at_ms <= before.beat_at_ms || worker.forwards < before.forwards) continue;
    const seconds = (worker.beat_at_ms - before.beat_at_ms) / 1_000;
    sum.rows += worker.forward_rows - before.forward_rows;
    sum.capacity += (worker.forwards - before.forwards) * worker.slots;
    sum.busy += worker.busy_s - before.busy_s;
    sum.seconds += seconds;
    sum.rate += (worker.forward_rows - before.forward_rows) / seconds;
  }
  for (const id of counters.keys()) if (!workers.some((worker) => worker.id === id)) counters.delete(id);
  return {
    fill: sum.capacity ? Math.min(1, sum.rows / sum.capacity) : null,
    busy: sum.seconds ? Math.min(1, sum.busy / sum.seconds) : null,
    steps: sum.seconds ? sum.rate : null,
  };
}
