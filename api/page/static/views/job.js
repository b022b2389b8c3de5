// One job: its images or previews, timeline, batching, error with a remedy, request, and what can be done with it.

import { html, useEffect, useState } from "../vendor/htm-preact-3.1.1.js";
import { call, withQuery } from "../core/api.js";
import {
  bodyOf,
  cancelJob,
  deleteJob,
  pauseJob,
  resumeJob,
  retryJob,
  submit,
  updateJob,
  withoutSeed,
} from "../core/actions.js";
import { clock, dateTime, duration, ended, figure, jobHref, makesSound, makesVideo, mediumOf, NAMES, plural, REASONS, remedy, sizeText, stateText, words } from "../core/format.js";
import { failingWith } from "../core/graph.js";
import { go, useLoaded, useStore } from "../core/hooks.js";
import { metadataText } from "../core/metadata.js";
import { current, follow, live, readJobs } from "../core/live.js";
import { mayChange, mayWrite, session } from "../core/session.js";
import { Bar } from "../parts/charts.js";
import { RowsPlot } from "../parts/plots.js";
import { confirm } from "../parts/dialogs.js";
import { ArtifactView, download, InputImage } from "../parts/media.js";
import { Snippets } from "../parts/snippets.js";
import { Ago, Badge, Button, Coded, Copy, ErrorNote, Facts, JobLink, Panel, Progress, Skeleton, toast } from "../parts/ui.js";
import { GraphPanel, useGraph } from "./graph.js";
import { droppedText, planText } from "./candidates.js";
import { choosePriority } from "./job_actions.js";

const MOST_EVENTS = 60;

export function JobPage({ id, tenant }) {
  const path = withQuery(`v1/jobs/${encodeURIComponent(id)}`, { tenant });
  const { data, error, loading, reload } = useLoaded((signal) => readJobs(path, { signal }), [path], 2_000);
  const { jobs } = useStore(live);
  const models = useLoaded((signal) => call("v1/models", { signal }), []).data?.data;
  useEffect(() => (tenant ? undefined : follow([id])), [id, tenant]); // the stream has the key's own jobs only
  const events = useEvents(id, tenant ? data : jobs.get(id));
  const graph = useGraph(id, tenant);
  if (loading && !data) return html`<${Skeleton} rows=${6} />`;
  if (!data || error?.status === 404) return html`<${ErrorNote} error=${error} retry=${reload} />`;
  const job = { ...current(data), tenant };
  const body = bodyOf(
    job,
    models?.find((one) => one.id === job.model),
  );
  return html`
    <${ErrorNote} error=${error} retry=${reload} />
    <div class="job-head">
      <${Badge} state=${job.status}>${stateText(job)}<//>
      <span class="job-id"><span class="mono cut">${job.id}</span><${Copy} text=${job.id} label="Copy the id" /></span>
      <span class="grow"></span>
      <${Actions} job=${job} graph=${graph} tenant=${tenant} body=${body} reload=${reload} />
    </div>
    ${job.status === "queued" && html`<${Waiting} job=${job} graph=${graph} />`}
    ${job.error && html`<${Failure} error=${job.error} />`}
    ${job.warnings.map((warning) => html`<p class="note is-queued" role="status">${warning.message}</p>`)}
    <div class="columns job">
      <div class="column">
        <${Images} job=${job} previews=${jobs.get(id)?.previews ?? []} />
        <${GraphPanel} id=${id} graph=${graph} />
        <${Timeline} job=${job} />
        <${Panel} title="Events" note=${events.length && !ended(data.status) ? "since this page was opened" : ""}>
          <ol class="events">${events.map((event) => html`<li key=${event.key}><time class="mono hint">
            ${clock(event.at)}</time><span>${event.text}</span></li>`)}</ol>
          ${!events.length && html`<p class="hint pad">None since this page was opened.</p>`}
        <//>
      </div>
      <div class="column">
        <${Request} job=${job} />
        <${Panel} title="The same call"><${Snippets} sound=${makesSound(job.task)} body=${body} /><//>
        <details class="panel raw"><summary>Raw JSON</summary><div class="snippets"><div class="snippets-bar">
          <span class="grow"></span><${Copy} text=${JSON.stringify(current(data), null, 2)} label="Copy the JSON">Copy<//></div>
          <pre tabindex="0" aria-label="The job as JSON"><code>${JSON.stringify(current(data), null, 2)}</code></pre></div>
          </details>
      </div>
    </div>
  `;
}

/** The changes of state and phase seen so far, the newest first. */
function useEvents(id, now) {
  const [events, setEvents] = useState([]);
  useEffect(() => setEvents([]), [id]);
  const text =
    now?.status &&
    [now.status, now.phase && words(now.phase), now.worker && now.status === "running" && `on ${now.worker}`]
      .filter(Boolean)
      .join(" · ");
  useEffect(() => {
    if (text)
      setEvents((before) =>
        [{ at: now.job?.finished_at ? Date.parse(now.job.finished_at) : Date.now(), text, key: before.length ? before[0].key + 1 : 0 }, ...before].slice(0, MOST_EVENTS),
      );
  }, [id, text]);
  return events;
}

function Waiting({ job: { id, paused_at, queue, not_before }, graph }) {
  const own = graph.jobs.find((one) => one.id === id);
  const waitedFor = graph.jobs.filter((one) => own.parents.includes(one.id) && !ended(one.status)).length;
  const why = () => {
    if (paused_at) return html`It was paused <${Ago} time=${paused_at} />, and goes on when it is resumed.`;
    if (waitedFor) return `It waits for ${plural(waitedFor, "job")} to end.`;
    if (queue?.reason === "waiting" && not_before) return `It is for later: ${dateTime(not_before)}.`;
    return queue?.reason ? REASONS[queue.reason] : "It waits.";
  };
  return html`
    <p class="note is-queued" role="status"><span>
      ${why()}
      ${queue?.position ? ` ${plural(queue.position, "job")} of its signature ahead.` : ""}
      ${queue?.eta_s ? ` It should end in about ${duration(queue.eta_s * 1_000)}.` : ""}
    </span></p>
  `;
}

const Failure = ({ error }) => html`
  <div class="note is-failed" role="alert">
    <div class="grow"><p><code>${error.code}</code> ${error.message}</p><p class="strong"><${Coded} text=${remedy(error)} /></p></div>
  </div>
`;

/** Whether jobs are of another tenant than the key: their inputs cannot be used in jobs of its own. */
const isForeign = (tenant) => Boolean(tenant) && tenant !== session.value.tenant;

/** Cancel a job for which others wait, after a question that says how many fail with it. */
const confirmCancel = (job, failing, hasMore, tenant) =>
  confirm({
    title: "Cancel this job?",
    text: `${hasMore ? "At least " : ""}${plural(failing.length, "job")} that ${failing.length > 1 ? "wait" : "waits"} for its result ${failing.length > 1 ? "fail" : "fails"} with it (parent_failed).`,
    verb: "Cancel",
    danger: true,
    run: async () => (await cancelJob(job.id, tenant), true),
  });

function Actions({ job, graph, tenant, body, reload }) {
  const again = async () => go(jobHref(await submit(withoutSeed(body))));
  const retry = async () => go(jobHref({ ...(await retryJob(job.id, tenant)), tenant }));
  const update = async () => {
    const done = await confirm({
      title: "Change the priority of this job?",
      text: "It keeps its age among the jobs of its new priority.",
      verb: "Change",
      choose: choosePriority(job.priority),
      run: async (progress, signal, priority) => (await updateJob(job.id, { priority }, tenant), true),
    });
    if (done) toast("Changed the priority");
    reload();
  };
  const cancel = async () => {
    const failing = failingWith(job.id, graph.jobs);
    if (failing.length) await confirmCancel(job, failing, graph.has_more, tenant);
    else await cancelJob(job.id, tenant);
    reload();
  };
  const pause = async () => {
    await (job.paused_at ? resumeJob : pauseJob)(job.id, tenant);
    reload();
  };
  const remove = async () => {
    const run = async () => (await deleteJob(job.id, tenant), true);
    const done = await confirm({
      title: "Delete this job?",
      text: "The job and its results are deleted for good.",
      verb: "Delete",
      danger: true,
      run,
    });
    if (done) {
      toast("Deleted the job");
      go(withQuery("#/jobs", { tenant }));
    }
  };
  if (!mayChange(tenant)) return null;
  return html`
    <div class="actions">
      ${!ended(job.status) && html`<${Button} icon="cancel" action=${cancel} disabled=${job.cancel_requested}>Cancel<//>`}
      ${!ended(job.status) && html`<${Button} icon=${job.paused_at ? "resume" : "pause"} action=${pause} disabled=${job.cancel_requested}>
        ${job.paused_at ? "Resume" : "Pause"}<//>`}
      ${job.status === "queued" && html`<${Button} icon="edit" action=${update}>Priority<//>`}
      ${["failed", "canceled", "expired"].includes(job.status) && html`<${Button} icon="redo" action=${retry}>Retry<//>`}
      ${!isForeign(tenant) && mayWrite() && html`<${Button} icon="dice" action=${again}>Another seed<//>
      <a class="button primary" href="#/playground?from=${job.id}">Duplicate and edit</a>`}
      ${!ended(job.status) && !isForeign(tenant) && mayWrite() && html`<a class="button" href="#/playground?after=${job.id}">New job after it</a>`}
      ${ended(job.status) && html`<${Button} icon="trash" label="Delete" action=${remove} />`}
    </div>
  `;
}

function Images({ job, previews }) {
  const expected = job.status === "queued" || job.status === "running" ? job.n * Math.max(1, job.layers) : 0;
  if (!job.artifacts.length && !expected) return null;
  return html`
    <${Panel} title=${job.artifacts.length ? "Result" : "Preview"} note=${expected ? progressText(job) : ""} actions=${job.artifacts.length > 0 && html`<${Button} icon="download" action=${() => Promise.all(job.artifacts.map((artifact) => download(job, artifact)))}>Save<//>`}>
      ${expected > 0 && html`<${Progress} value=${job.progress.percent} label="Steps" state=${job.status} />`}
      <div class="results">
        ${job.artifacts.map((artifact) => html`<figure key=${artifact.index}>
          <${ArtifactView} job=${job} artifact=${artifact} size="large" />
          <figcaption class="hint mono">seed ${artifact.seed}${artifact.score !== null && ` · score ${artifact.score}`}</figcaption></figure>`)}
        ${Array.from({ length: expected }, (_, index) => html`<${Preview} key=${index} job=${job} src=${previews[index]} />`)}
      </div>
    <//>
  `;
}

export function progressText(job) {
  const { step, total } = job.progress;
  if (job.status === "queued") return stateText(job);
  return `${words(job.phase ?? "starting")}${total ? ` · step ${step} of ${total}` : ""}`;
}

export const Preview = ({ job, src }) => html`
  <div class="preview is-${job.status}" style=${{ aspectRatio: `${job.width} / ${job.height}` }}>
    ${src ? html`<img src=${src} alt="Preview of ${job.prompt || words(job.task)}" />` : html`<span class="hint">
      ${job.status === "queued" ? stateText(job) : "…"}</span>`}
  </div>
`;

/** Where its time went: waiting, loading, forwards, upload. */
function Timeline({ job }) {
  const { queue_ms, load_ms, inference_ms, upload_ms, device_seconds } = job.metrics;
  const parts = [
    ["queued", queue_ms, "is-queued"],
    ["loading", load_ms, "is-loading"],
    ["forwards", inference_ms, "is-running"],
    ["upload", upload_ms, "is-succeeded"],
  ].filter(([, ms]) => ms !== null);
  const batching = job.batching;
  return html`
    <${Panel} title="Timeline">
      ${
        parts.length > 0 &&
        html`
        <${Bar} label="Timeline" parts=${parts.map(([name, ms, kind]) => [name, ms, kind, duration(ms)])} />
        <ul class="legend">${parts.map(([name, ms, kind]) => html`<li key=${name}><i class=${kind}></i>
          ${name} <span class="strong number">${duration(ms)}</span></li>`)}</ul>
      `
      }
      ${batching?.rows_by_forward.length > 0 && html`<${RowsPlot} parts=${batching.rows_by_forward} forwards=${batching.forwards} />`}
      <${Facts} facts=${{
        Created: html`${dateTime(job.created_at)}, <${Ago} time=${job.created_at} />`,
        Claimed: job.started_at && dateTime(job.started_at),
        Ended: job.finished_at && dateTime(job.finished_at),
        Attempts: job.attempts > 1 && job.attempts,
        "Not before": job.not_before && dateTime(job.not_before),
        Deadline: job.deadline_at && dateTime(job.deadline_at),
        "Kept until": job.expires_at && dateTime(job.expires_at),
        "Device time": device_seconds !== null && `${figure(device_seconds)} s`,
        Forwards: batching?.forwards > 0 && `${batching.forwards}, ${figure(batching.mean_rows)} rows in the mean`,
        "Batch mates":
          batching &&
          (batching.solo_reason
            ? `none: ${words(batching.solo_reason)}`
            : `up to ${batching.max_jobs} jobs in a forward`),
        "Skipped steps": batching?.skipped_steps > 0 && batching.skipped_steps,
        "Dropped candidates": batching && droppedText(batching.dropped),
      }} />
    <//>
  `;
}

const SHOWN = [
  ...["task", "width", "height", "duration_s", "seed", "steps", "guidance_scale", "guidance_scale_2", "strength", "scheduler", "scheduler_options"],
  ...["n", "best_of", "output_format", "output_quality", "reproducible", "priority", "embed_parameters"],
];

const OF_MASKS = ["keep_unmasked", "mask_blur", "mask_padding"];

/** The fields of a request that `Request` does not name, if they are set and change something. */
function otherFields(job) {
  const unseen = job.mask ? SHOWN : [...SHOWN, ...OF_MASKS];
  const others = Object.keys(session.value.same_fields).filter((name) => !unseen.includes(name));
  const label = (name) => words(name[0].toUpperCase() + name.slice(1));
  const text = (value) => {
    if (value === true) return "yes";
    return value && typeof value === "object" ? JSON.stringify(value) : value;
  };
  return Object.fromEntries(others.map((name) => [label(name), text(job[name])]));
}

/** The class of the noise scheduler with its options, if the job chooses any. */
function schedulerText(job) {
  const options = Object.entries(job.scheduler_options ?? {}).filter(([, value]) => value !== null && value !== false);
  const texts = options.map(([name, value]) => (value === true ? name : `${name} ${[value].flat().join(", ")}`));
  return [job.scheduler, ...texts].filter(Boolean).join(", ");
}

function Request({ job }) {
  const inputs = [
    ...job.images.map((image, index) => [job.images.length > 1 ? `image ${index + 1}` : "image", image]),
    ...(job.mask ? [["mask", job.mask]] : []),
    ...(job.last_image ? [["last image", job.last_image]] : []),
    ...(job.video ? [[`video, ${job.video.frames} frames`, job.video]] : []),
    ...(job.face_video ? [["faces", job.face_video]] : []),
    ...(job.audio ? [["audio", job.audio]] : []),
    ...job.controls.map((control) => [`control ${control.id}`, control.image]),
  ];
  const metadata = Object.entries(job.metadata);
  return html`
    <${Panel} title="Request">
      <div class="prompt-text"><p>${job.prompt || words(job.task)}</p>
        ${job.negative_prompt && html`<p class="hint">without: ${job.negative_prompt}</p>`}</div>
      ${inputs.length > 0 && html`<div class="inputs">
        ${inputs.map(([name, image]) => html`<${InputImage} key=${name + (image.id ?? image.job)} name=${name} image=${image} isForeign=${isForeign(job.tenant)} />`)}
        </div>`}
      <${Facts} facts=${{
        Tenant: job.tenant,
        Model: html`<a href="#/models">${job.model}</a>`,
        Task: words(job.task),
        [makesSound(job.task) ? "Length" : "Size"]: !job.task.endsWith("mesh") && sizeText(job),
        [NAMES[mediumOf(job.task)]]: job.n,
        Candidates: job.best_of && planText(job.best_of),
        Frames: makesVideo(job.task) && `${job.frames} at ${job.fps} fps`,
        Steps: job.steps,
        Guidance: [job.guidance_scale, job.guidance_scale_2].filter((value) => value !== null).join(" and "),
        Seed: html`<span class="mono">${job.seed}</span>`,
        Strength: job.strength,
        Scheduler: schedulerText(job),
        ...otherFields(job),
        "Step cache": job.step_cache && `every ${job.step_cache.every} steps`,
        Adapters: job.adapters.map((adapter) => `${adapter.id} ${adapter.scale}`).join(", "),
        Controls: job.controls
          .map((control) => `${control.id} ${control.scale}, ${control.start} to ${control.end}`)
          .join("; "),
        Reproducible: job.reproducible && "yes",
        Format: `${job.output_format}${["png", "wav", "flac", "glb"].includes(job.output_format) ? "" : ` at ${job.output_quality}`}`,
        Priority: job.priority,
        After:
          job.after.length > 0 &&
          job.after.map((parent, at) => html`${at > 0 && ", "}<${JobLink} key=${parent} id=${parent} tenant=${job.tenant} />`),
        "If one fails": job.after.length > 0 && (job.on_parent_failure === "run" ? "it runs all the same" : "it fails"),
        Group: job.group && html`<a href=${withQuery("#/jobs", { tenant: job.tenant, group: job.group })}>${job.group}</a>`,
        Batch: job.batch_id && html`<a href=${withQuery("#/jobs", { tenant: job.tenant, batch_id: job.batch_id })}>${job.batch_id}</a>`,
        Metadata:
          metadata.length > 0 &&
          metadata.map(
            ([key, value]) =>
              html`<a key=${key} class="tag" href=${withQuery("#/jobs", { tenant: job.tenant, metadata: metadataText({ [key]: value }) })}>
                ${key}=${value}</a> `,
          ),
      }} />
    <//>
  `;
}
