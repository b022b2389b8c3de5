// What the page does to jobs, one or many.

import { ApiError, call, serverNow, withQuery } from "./api.js";
import { makesSound, makesVideo } from "./format.js";
import { readMetadata } from "./metadata.js";
import { refresh } from "./overview.js";
import { session } from "./session.js";

const COUNTED = 2_000; // jobs that a confirmation counts exactly
const PAUSES = 6;

/** Filters as the API's lists take them, or an error for one that cannot be read: without it, more jobs would match. */
export function queryOf({ tenant, status, model, batch_id, group, parent, prompt, after_time, before_time, metadata: text }) {
  const { metadata, fault } = readMetadata(text);
  if (fault) throw new Error(fault);
  const times = { created_after: instant(after_time), created_before: instant(before_time) };
  const query = { tenant, status, model, batch_id, group, parent, prompt, ...times };
  for (const [key, value] of Object.entries(metadata)) query[`metadata.${key}`] = value;
  return query;
}

function instant(local) {
  if (!local) return undefined;
  if (Number.isNaN(Date.parse(local))) throw new Error(`${local} is not a time`);
  return new Date(local).toISOString();
}

export const cancelJob = (id, tenant) => change("POST", id, "/cancel", tenant);
export const pauseJob = (id, tenant) => change("POST", id, "/pause", tenant);
export const resumeJob = (id, tenant) => change("POST", id, "/resume", tenant);
export const retryJob = (id, tenant) => change("POST", id, "/retry", tenant);
export const updateJob = (id, json, tenant) => change("PATCH", id, "", tenant, json);
export const deleteJob = (id, tenant) => change("DELETE", id, "", tenant);

/** Change a job of the key's own tenant, or of the one that an operator names. */
const change = (method, id, action, tenant, json) =>
  changed(call(withQuery(`v1/jobs/${id}${action}`, { tenant }), { method, json }));

async function changed(request) {
  const response = await request;
  refresh();
  return response;
}

/** Submit a request body with previews, and return the job. A repetition by the browser is the same job. */
export async function submit(body) {
  return changed(call("page/jobs", { method: "POST", json: body, headers: newKey() }));
}

const newKey = () => ({ "Idempotency-Key": crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` });

const CHANGES = {
  cancel: ["POST", "v1/jobs:cancel"],
  pause: ["POST", "v1/jobs:pause"],
  resume: ["POST", "v1/jobs:resume"],
  update: ["POST", "v1/jobs:update"],
  retry: ["POST", "v1/jobs:retry"],
  delete: ["DELETE", "v1/jobs"],
  redrive: ["POST", "v1/dead-letters:redrive"],
  purge: ["POST", "v1/dead-letters:purge"],
};

/** Filters of jobs that exist now: those submitted later match too, and so do the copies that a retry makes. */
export function untilNow(query) {
  const now = new Date(serverNow()).toISOString();
  return query.created_before < now ? query : { ...query, created_before: now };
}

/** How many jobs or dead letters `changeMatching` would change; `more` if there are more than are counted. */
export async function countMatching(action, query, { json, signal }) {
  let total = 0;
  let after;
  for (;;) {
    const piece = await nextPiece(action, { ...query, after, dry_run: true }, { json, signal });
    total += piece.ids.length;
    after = piece.next_cursor;
    if (!piece.has_more || total >= COUNTED) return { total, more: piece.has_more };
  }
}

/**
 * Change all jobs or dead letters that match, piece by piece; `json` is the body of an update. `progress` is called with
 * the number so far.
 */
export async function changeMatching(action, query, { json, progress, signal }) {
  const headers = newKey(); // a retry that is repeated does not reach its own new jobs
  let done = 0;
  let after;
  for (;;) {
    const piece = await nextPiece(action, { ...query, after }, { json, headers, signal });
    done += piece.ids.length;
    progress(done);
    after = piece.next_cursor;
    if (!piece.has_more) break;
  }
  refresh();
  return done;
}

/** One piece of a change. A refusal that passes, such as too many requests, is waited out. */
async function nextPiece(action, query, options) {
  const [method, path] = CHANGES[action];
  for (let pauses = 1; ; pauses += 1) {
    try {
      return await call(withQuery(path, query), { method, ...options });
    } catch (error) {
      if (!(error instanceof ApiError) || !error.passes || pauses > PAUSES) throw error;
      await new Promise((resolve) => setTimeout(resolve, 500 * 2 ** pauses));
    }
  }
}

/** Do something to each of some jobs, four at a time, until `signal`; returns how many succeeded and the first error. */
export async function each(ids, action, progress = () => {}, signal = null) {
  const left = [...ids];
  let done = 0;
  let failure = null;
  const work = async () => {
    for (let id = left.shift(); id !== undefined && !signal?.aborted; id = left.shift()) {
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

/** What names an input in a request: its id, or the artifact of another job that it is. */
function inputName({ id, job, artifact }) {
  if (id !== null) return id;
  return artifact === 0 ? job : new URL(`v1/jobs/${job}/artifacts/${artifact}`, document.baseURI).href;
}

/** The body that would make this job again; that of a job without its model names some of the model's defaults too. */
export function bodyOf(job, model = null) {
  const body = job.prompt ? { model: job.model, prompt: job.prompt } : { model: job.model };
  if (job.negative_prompt !== (model?.defaults.negative_prompt ?? null)) body.negative_prompt = job.negative_prompt;
  for (const [name, unset] of Object.entries(session.value.same_fields)) {
    if (job[name] !== null && job[name] !== unset) body[name] = job[name];
  }
  if (["png", "mp4", "wav", "glb"].includes(job.output_format)) delete body.output_format;
  if (makesSound(job.task) || job.task.endsWith("mesh")) {
    delete body.width; // 0 of sounds; those of a mesh's thumbnail, which requests cannot choose
    delete body.height;
  }
  if (job.audio) body.audio = inputName(job.audio);
  // Presigned URLs are shown without their signatures: they cannot be used again.
  const { bucket, prefix } = job.output ?? {};
  if (bucket) body.output = prefix ? { bucket, prefix } : { bucket };
  if (job.images.length === 1) body.image = inputName(job.images[0]);
  if (job.images.length > 1) body.images = job.images.map(inputName);
  if (job.mask) body.mask = inputName(job.mask);
  if (job.last_image) body.last_image = inputName(job.last_image);
  if (job.video) body.video = inputName(job.video);
  if (job.face_video) body.face_video = inputName(job.face_video);
  if (job.adapters.length) body.adapters = job.adapters.map(({ id, scale }) => ({ id, scale }));
  if (job.controls.length) {
    body.controls = job.controls.map(({ id, image, scale, start, end }) => ({
      id,
      image: inputName(image),
      scale,
      start,
      end,
    }));
  }
  if (makesVideo(job.task)) Object.assign(body, { frames: job.frames, fps: job.fps });
  if (job.layers) body.layers = job.layers;
  if (model?.refiner && job.refiner_start === null) body.refiner_start = 1;
  const level = levelOf(job.step_cache, model?.step_cache);
  if (level && level !== model?.step_cache.default) body.step_cache = level;
  return body;
}

/** The choice of a request for a job's schedule: a level where the model has one, as not all take schedules. */
function levelOf(schedule, caching) {
  if (!schedule || !caching) return schedule ?? (caching && "off");
  const text = JSON.stringify(schedule);
  return caching.allowed.find((level) => JSON.stringify(caching[level]) === text) ?? schedule;
}

/** A body that starts from the first image of a job. */
export function bodyFromResult(job, model) {
  const { seed: _, task, images, mask, last_image, video, face_video, strength, ...rest } = bodyOf(job, model);
  if (makesSound(task)) {
    const { audio: _audio, repaint_start_s: _start, repaint_end_s: _end, ...others } = rest;
    return { ...others, ...(task === "audio_to_audio" ? { strength } : {}), audio: job.id };
  }
  if (job.artifacts[0].kind === "video") return { ...rest, strength, task: "video_to_video", video: job.id };
  return { ...rest, ...(task === "inpaint" ? {} : { strength }), image: job.id };
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
