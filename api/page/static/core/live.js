// Jobs followed over one stream: their states, steps and previews as they happen.

import { call, events, withQuery } from "./api.js";
import { createStore } from "./hooks.js";
import { ended } from "./format.js";

const MOST_JOBS = 64; // of one stream
const MOST_KEPT = 256; // states of jobs that are no longer followed
const SETTLE_MS = 150; // several changes of what is followed are one new stream
const RETRY_MS = [500, 1_000, 2_000, 5_000, 10_000];

/**
 * `jobs` has for each id: status, phase, progress, worker, previews by image, and `job` with the time of its end
 * (`endedAt`) once it has ended.
 */
export const live = createStore({ jobs: new Map(), connected: true });

const wanted = new Map(); // id -> how many views want it
const finished = new Set(); // called with each job that ends
let abort = null;
let timer = 0;
let failures = 0;

/** Follow jobs; returns a function that stops it. */
export function follow(ids) {
  for (const id of ids) wanted.set(id, (wanted.get(id) ?? 0) + 1);
  restart();
  return () => {
    for (const id of ids) {
      const left = wanted.get(id) - 1;
      if (left) wanted.set(id, left);
      else wanted.delete(id);
    }
    restart();
  };
}

/** Call `listener` with every followed job that ends. */
export function onEnd(listener) {
  finished.add(listener);
  return () => finished.delete(listener);
}

const followed = () =>
  [...wanted.keys()].filter((id) => !ended(live.value.jobs.get(id)?.status ?? "queued")).slice(-MOST_JOBS);

function restart(delay = SETTLE_MS) {
  clearTimeout(timer);
  timer = setTimeout(connect, delay);
}

let connectedTo = "";

async function connect() {
  const ids = followed();
  const target = ids.join(",");
  if (document.hidden) return; // again when the page is shown
  if (abort && target === connectedTo) return;
  abort?.abort();
  abort = null;
  if (!ids.length) return note(true);
  const mine = (abort = new AbortController());
  connectedTo = target;
  try {
    for await (const { kind, data } of events(withQuery("page/live", { jobs: target }), mine.signal)) {
      failures = 0;
      note(true);
      take(kind, data);
    }
    if (abort === mine) abort = null;
    if (followed().length) restart(500); // the service has ended the stream
  } catch (error) {
    if (mine.signal.aborted) return;
    abort = null;
    if (error.status === 401 || error.status === 403) return;
    note(false);
    restart(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    abort?.abort();
    abort = null;
  } else {
    restart(0);
  }
});

function note(connected) {
  if (live.value.connected === connected) return;
  live.value.connected = connected;
  live.changed();
}

function take(kind, data) {
  const { jobs } = live.value;
  const known = jobs.get(data.id) ?? { previews: [] };
  if (kind === "preview") {
    const previews = [...known.previews];
    previews[data.index] = data.url;
    jobs.set(data.id, { ...known, previews });
  } else if (kind === "job") {
    jobs.set(data.id, { ...known, ...data, worker: data.worker ?? known.worker });
  } else if (kind === "end") {
    const { status, progress } = data;
    jobs.set(data.id, { ...known, status, phase: null, progress, job: data, endedAt: performance.now() });
    for (const listener of finished) listener(data);
  } else if (kind === "gone") {
    jobs.set(data.id, { ...known, status: "deleted" });
  }
  for (const id of jobs.keys()) {
    if (jobs.size <= MOST_KEPT) break;
    if (!wanted.has(id)) jobs.delete(id);
  }
  live.changed();
}

/** Forget everything: another key can be another tenant's. */
export function reset() {
  abort?.abort();
  abort = null;
  connectedTo = "";
  live.set({ jobs: new Map(), connected: true });
  restart(0);
}

/**
 * Read a job or a list of jobs. One that is open although its end was seen before the read was redriven: what was known
 * of it is forgotten, and it is followed again.
 */
export async function readJobs(path, { signal } = {}) {
  const begunAt = performance.now();
  const response = await call(path, { signal });
  for (const job of response.data ?? [response]) {
    if (ended(job.status) || !(live.value.jobs.get(job.id)?.endedAt < begunAt)) continue;
    live.value.jobs.delete(job.id);
    restart();
  }
  return response;
}

/** A job with what is known of it since it was read. */
export function current(job) {
  const now = live.value.jobs.get(job.id);
  if (!now || ended(job.status)) return job;
  return (
    now.job ?? { ...job, status: now.status ?? job.status, phase: now.phase, progress: now.progress ?? job.progress }
  );
}
