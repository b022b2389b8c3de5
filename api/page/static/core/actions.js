// What the page does to jobs, one or many.

import { ApiError, call, withQuery } from "./api.js";
import { refresh } from "./overview.js";

const COUNTED = 2_000; // jobs that a confirmation counts exactly
const PAUSES = 6;

/** Filters as the API's lists take them; `metadata` is `key=value`, several of them separated by commas. */
export function queryOf({ status, model, batch_id, after_time, before_time, metadata }) {
  const query = { status, model, batch_id, created_after: instant(after_time), created_before: instant(before_time) };
  for (const pair of (metadata ?? "").split(",")) {
    const [key, ...value] = pair.split("=");
    if (key.trim() && value.length) query[`metadata.${key.trim()}`] = value.join("=").trim();
  }
  return query;
}

const instant = (local) => (local && !Number.isNaN(Date.parse(local)) ? new Date(local).toISOString() : undefined);

export const cancelJob = (id) => changed(call(`v1/jobs/${id}/cancel`, { method: "POST" }));
export const deleteJob = (id) => changed(call(`v1/jobs/${id}`, { method: "DELETE" }));

async function changed(request) {
  const response = await request;
  refresh();
  return response;
}

/** Submit a request body with previews, and return the job. A repetition by the browser is the same job. */
export async function submit(body) {
  const key = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  return changed(call("page/jobs", { method: "POST", json: body, headers: { "Idempotency-Key": key } }));
}

/** How many jobs match; `more` if there are more than are counted. */
export async function countMatching(filters, statuses, signal) {
  let total = 0;
  let after;
  for (;;) {
    const query = { ...queryOf(filters), status: statuses.join(","), limit: 100, after };
    const page = await call(withQuery("v1/jobs", query), { signal });
    total += page.data.length;
    after = page.next_cursor;
    if (!page.has_more || total >= COUNTED) return { total, more: page.has_more };
  }
}

/**
 * Cancel or delete all jobs that match, piece by piece. `progress` is called with the number so far. A refusal that
 * passes, such as too many requests, is waited out.
 */
export async function changeMatching(action, filters, progress, signal) {
  let done = 0;
  let after;
  let pauses = 0;
  for (;;) {
    const path = action === "cancel" ? "v1/jobs:cancel" : "v1/jobs";
    try {
      const options = { method: action === "cancel" ? "POST" : "DELETE", signal };
      const piece = await call(withQuery(path, { ...queryOf(filters), after }), options);
      done += piece.ids.length;
      progress(done);
      after = piece.next_cursor;
      pauses = 0;
      if (!piece.has_more) break;
    } catch (error) {
      if (!(error instanceof ApiError) || !error.passes || (pauses += 1) > PAUSES) throw error;
      await new Promise((resolve) => setTimeout(resolve, 500 * 2 ** pauses));
    }
  }
  refresh();
  return done;
}

/** Do something to each of some jobs, four at a time; returns how many succeeded and the first error. */
export async function each(ids, action, progress = () => {}) {
  const left = [...ids];
  let done = 0;
  let failure = null;
  const work = async () => {
    for (let id = left.shift(); id !== undefined; id = left.shift()) {
      try {
        await action(id);
        done += 1;
      } catch (error) {
        failure ??= error;
      }
      progress(done);
    }
  };
  await Promise.all([work(), work(), work(), work()]);
  refresh();
  return { done, failure };
}

/** The body that would make this job again. */
export function bodyOf(job) {
  const body = { model: job.model, prompt: job.prompt };
  const same = ["negative_prompt", "width", "height", "n", "seed", "steps", "guidance_scale", "guidance_scale_2"];
  for (const name of [...same, "scheduler", "strength", "reproducible", "priority", "output_format", "task"]) {
    if (job[name] !== null && job[name] !== "" && job[name] !== false) body[name] = job[name];
  }
  if (job.n === 1) delete body.n;
  if (job.priority === "standard") delete body.priority;
  if (job.output_format === "png" || job.output_format === "mp4") delete body.output_format;
  if (job.images.length === 1) body.image = job.images[0].id;
  if (job.images.length > 1) body.images = job.images.map((image) => image.id);
  if (job.mask) body.mask = job.mask.id;
  if (job.last_image) body.last_image = job.last_image.id;
  if (job.adapters.length) body.adapters = job.adapters.map(({ id, scale }) => ({ id, scale }));
  if (job.controls.length) {
    body.controls = job.controls.map(({ id, image, scale, start, end }) => ({
      id,
      image: image.id,
      scale,
      start,
      end,
    }));
  }
  if (job.task.endsWith("video")) Object.assign(body, { frames: job.frames, fps: job.fps });
  if (job.layers) body.layers = job.layers;
  if (job.step_cache) body.step_cache = job.step_cache;
  return body;
}

/** The same body with a seed of the service's choice. */
export function withoutSeed(body) {
  const { seed: _, ...rest } = body;
  return rest;
}

/** Save a response's body as a file; a link would not send the key. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
