// Numbers, times and codes as text.

const numbers = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value < 100_000 ? numbers.format(value) : short.format(value));

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : /[cs]h$/.test(noun) ? "es" : "s"}`;

/** A number with two significant digits below 100. */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(value < 1 ? 2 : 1);
  return count(Math.round(value));
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)}%`);

/** Milliseconds with the two largest units. */
export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms < 1_000) return `${Math.max(0, Math.round(ms))} ms`;
  const s = ms / 1_000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3_600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86_400) return `${Math.floor(s / 3_600)} h ${Math.floor((s % 3_600) / 60)} min`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3_600)} h`;
}

/** How long ago a time was, in one unit. */
export function ago(time, now) {
  if (time === null || time === undefined) return "–";
  const s = Math.max(0, (now - (typeof time === "number" ? time : Date.parse(time))) / 1_000);
  return s < 5 ? "just now" : `${oneUnit(s)} ago`;
}

/** Seconds in one unit. */
export function oneUnit(s, rounded = Math.floor) {
  if (s < 60) return `${rounded(s)} s`;
  if (s < 3_600) return `${rounded(s / 60)} min`;
  if (s < 86_400) return `${rounded(s / 3_600)} h`;
  return `${rounded(s / 86_400)} d`;
}

export const clock = (time) =>
  new Date(time).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const dateTime = (time) => (time ? `${new Date(time).toLocaleDateString("en-CA")} ${clock(time)}` : "–");

export function bytes(value) {
  if (!value) return "0 B";
  const unit = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${figure(value / 1024 ** unit)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** The random end of an id: its beginning is the time, alike in all new ones. */
export const shortId = (id) => (id.length > 14 ? `${id.split("_")[0]}_…${id.slice(-6)}` : id);

/** The address of a job's view; `tenant` is that of a job which an operator reads. */
export const jobHref = ({ id, tenant }) => `#/jobs/${id}${tenant ? `?tenant=${tenant}` : ""}`;

export const words = (name) => name.replaceAll("_", " ");

export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

export const PRIORITIES = ["interactive", "standard", "bulk"];
export const STATES = ["queued", "running", "succeeded", "failed", "canceled", "expired"];
export const ended = (status) => status !== "queued" && status !== "running";

/** The state of a job, or what it is on the way to. */
export function stateText({ status, cancel_requested, paused_at, queue }) {
  if (ended(status)) return status;
  if (cancel_requested) return "stopping";
  if (status === "queued" && queue?.reason === "waiting") return "waiting";
  if (!paused_at) return status;
  return status === "queued" ? "paused" : "pausing";
}

export const REASONS = {
  no_worker: "No worker serves its model.",
  worker_starting: "A worker is starting.",
  model_unavailable: "No worker can load the model; it is tried again.",
  workers_draining: "The workers are being stopped.",
  tenant_limit: "One of the tenant's running jobs must end first.",
  batch_mates: "It waits for jobs that can share its batch.",
  model_loading: "A worker is loading the model.",
  idle_worker: "It needs a worker without other jobs.",
  paused: "An operator has paused its model, its tenant or everything.",
  waiting: "It is for later, or waits for other jobs.",
  jobs_ahead: "Other jobs are ahead of it.",
  next: "It starts as soon as a worker has room.",
};

const REMEDIES = {
  out_of_memory:
    "Use a smaller size, fewer images or fewer frames, or lower max_batch of the model; then submit it again.",
  invalid_input_image:
    "Upload another image as PNG, JPEG or WebP; this one cannot be decoded or has a side the model refuses.",
  non_finite_latents:
    "The model produced NaN: use another seed, a lower guidance, or a dtype with more range (bfloat16 or float32).",
  model_unavailable:
    "`fusequeue doctor` checks the model's files and says what to do; the worker's log has the first error.",
  adapter_unavailable: "Check the adapter's file in models.toml; the worker's log has the reason.",
  pause_expired: "It was paused for too long; retry it.",
  parent_failed:
    "A job that it waited for did not succeed. Retry that one first, or both together: this one then waits for it.",
  deadline_exceeded: "Submit it with a longer deadline_s, with a higher priority, or add workers.",
  upload_failed: "The storage refused the result: check it with `fusequeue doctor`, then submit the job again.",
  worker_lost:
    "Each worker that ran it was lost, at last while it ran solo: their logs say how they ended. Once the cause is found, redrive its dead letter.",
  encoding_failed: "Use another output format; the worker's log has the reason.",
  inference_failed:
    "The pipeline refused the request: read the message, change the field it names, and submit it again.",
};

/** What to do about an error of a job. */
export function remedy(error) {
  if (REMEDIES[error.code]) return REMEDIES[error.code];
  if (error.param) return `Change ${error.param} and submit the job again.`;
  return error.retryable
    ? "It can pass by itself: submit the job again."
    : "The worker's log has this job's id and the reason.";
}

export const makesSound = (task) => task.includes("audio");

/** Whether a task makes a video. */
export const makesVideo = (task) => task === "animate" || task.endsWith("video");

/** What a task makes. */
export const mediumOf = (task) =>
  task.endsWith("mesh") ? "mesh" : makesSound(task) ? "audio" : makesVideo(task) ? "video" : "image";

/** The names of several. */
export const NAMES = { image: "Images", video: "Videos", audio: "Sounds", mesh: "Meshes" };

/** The sides of an image or video, or the seconds of a sound. */
export const sizeText = (made) =>
  made.width ? `${made.width} × ${made.height}` : made.duration_s ? `${Number(made.duration_s.toFixed(2))} s` : "";
