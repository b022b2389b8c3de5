// A prompt to its image: a form of the model's own limits, the job as it runs, and what can follow.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { call } from "../core/api.js";
import { bodyFromResult, bodyOf, cancelJob, submit, withoutSeed } from "../core/actions.js";
import { duration, ended, plural, REASONS, remedy, makesSound, mediumOf, sizeText, stateText } from "../core/format.js";
import { createStore, go, useKeys, useLoaded, useStore } from "../core/hooks.js";
import { current, follow, live, readJobs } from "../core/live.js";
import { announce, mayWrite } from "../core/session.js";
import { ArtifactView, download, isMesh, meshText, Thumb } from "../parts/media.js";
import { Snippets } from "../parts/snippets.js";
import { Badge, Button, Coded, Empty, ErrorNote, Facts, Panel, Progress, Skeleton } from "../parts/ui.js";
import { Preview, progressText } from "./job.js";
import { Form } from "./form.js";
import { blank, bodyFrom, fieldsOf, needsPrompt, valuesFrom } from "./request.js";

const MOST_RUNS = 24;

/** The runs of this tab, the newest first, and the form: both outlive a look at another view. */
const runs = createStore([]);
const draft = { values: null };

/** Forget the runs: another tenant's page must not show them. */
export function forgetRuns() {
  runs.set([]);
  draft.values = null;
}

export function Playground({ params }) {
  const { data, error, loading, reload } = useLoaded((signal) => call("v1/models", { signal }), []);
  if (loading && !data) return html`<${Skeleton} rows=${6} />`;
  if (!data) return html`<${ErrorNote} error=${error} retry=${reload} />`;
  if (!data.data.length) return html`<${Empty} icon="models" title="No models.">List them in models.toml.<//>`;
  return html`<${Desk} models=${data.data} params=${params} />`;
}

function Desk({ models, params }) {
  const named = params.get("model");
  const modelOf = (job) => models.find((one) => one.id === job.model);
  const [values, setValues] = useState(
    () => draft.values ?? blank(models.find((model) => model.id === named) ?? models[0]),
  );
  const [shown, setShown] = useState(null);
  const [fault, setFault] = useState(null);
  const model = models.find((one) => one.id === values.model) ?? models[0];
  draft.values = values;
  const [from, after] = [params.get("from"), params.get("after")];
  useEffect(() => {
    const edit = (job) => setValues(valuesFrom(bodyOf(job, modelOf(job)), models));
    if (named && named !== values.model) setValues(blank(models.find((one) => one.id === named) ?? models[0], values, model));
    if (from) call(`v1/jobs/${encodeURIComponent(from)}`).then(edit, setFault);
    if (after) setValues((before) => ({ ...before, after }));
    if (named || from || after) go("#/playground", { replace: true }); // "back" leads to the form as it was left
  }, [named, from, after]);
  const all = useStore(runs);
  const body = bodyFrom(values, model);
  const start = async (request) => {
    setFault(null);
    try {
      const job = await submit(request);
      runs.set([job, ...runs.value].slice(0, MOST_RUNS));
      setShown(job.id);
      announce("The job is queued.");
      // On a narrow page it is below the form.
      requestAnimationFrame(() => document.querySelector(".run-panel")?.scrollIntoView({ block: "nearest" }));
    } catch (failure) {
      setFault(failure);
      document.querySelector(`[name="${failure.param?.split(".")[0]}"]`)?.focus();
    }
  };
  const change = (next) => {
    setFault(null); // of the values before
    setValues(next);
  };
  const form = useRef(null);
  useKeys((event) => {
    if (event.key === "e") {
      event.preventDefault();
      form.current.querySelector("textarea")?.focus();
    }
  });
  const job = all.find((one) => one.id === shown) ?? all[0];
  return html`
    <div class="columns playground" ref=${form}>
      <${Form} models=${models} model=${model} values=${values} setValues=${change} fault=${fault} generate=${() => start(body)} />
      <div class="column">
        ${
          job
            ? html`<${Run} key=${job.id} first=${job} model=${modelOf(job)} start=${start} edit=${(request) => setValues(valuesFrom(request, models))} />`
            : html`<${Panel} title="Result">
              <${Empty} icon="playground" title="Nothing generated yet.">${beginning(fieldsOf(values.task, model), values, model)} and press Generate. It appears here while its steps run.<//><//>`
        }
        ${all.length > 1 && html`<${History} all=${all} shown=${job.id} show=${setShown} />`}
        <${Panel} title="The same call" note="for your own programs"><${Snippets} body=${body} sound=${makesSound(values.task)} /><//>
      </div>
    </div>
  `;
}

/** What the form needs first. */
function beginning({ image, video, medium }, values, model) {
  if (needsPrompt(values, model)) return `Describe ${{ audio: "a sound", video: "a video" }[medium] ?? "an image"}`;
  return video && !image ? "Add a video" : "Add an image";
}

/** One job from its submission to its images. */
function Run({ first, model, start, edit }) {
  const { jobs } = useStore(live);
  useEffect(() => follow([first.id]), [first.id]);
  const status = jobs.get(first.id)?.status ?? first.status;
  const everyMs = ended(status) ? 0 : status === "queued" ? 1_000 : 4_000; // the stream has no position in the queue
  const { data } = useLoaded((signal) => readJobs(`v1/jobs/${first.id}`, { signal }), [first.id], everyMs);
  const job = current(data ?? first);
  const now = jobs.get(first.id);
  const done = ended(job.status);
  useEffect(() => {
    if (!done) return;
    announce(
      job.status === "succeeded"
        ? `${plural(job.artifacts.length, { audio: "sound" }[mediumOf(job.task)] ?? mediumOf(job.task))} ready.`
        : `The job is ${job.status}.`,
    );
    runs.set(runs.value.map((one) => (one.id === job.id ? job : one)));
  }, [done]);
  const note = job.status === "queued" ? place(job) : progressText(job);
  return html`
    <${Panel} title=${done ? "Result" : "Generating"} kind="run-panel"
      actions=${html`<${Badge} state=${job.status}>${stateText(job)}<//>
        ${!done && mayWrite() && html`<${Button} icon="cancel" disabled=${job.cancel_requested} action=${() => cancelJob(job.id)}>Cancel<//>`}`}>
      ${!done && html`<${Progress} value=${job.progress.percent} label="Steps" state=${job.status} />
        <p class="hint pad" role="status">${note}</p>`}
      ${job.error && html`<div class="note is-failed" role="alert"><div><p><code>${job.error.code}
        </code> ${job.error.message}</p><p class="strong"><${Coded} text=${remedy(job.error)} /></p></div></div>`}
      <div class="results ${job.n === 1 ? "single" : ""}">
        ${
          done
            ? job.artifacts.map(
                (artifact) =>
                  html`<figure key=${artifact.index}><${ArtifactView} job=${job} artifact=${artifact} size="large" />
                    </figure>`,
              )
            : Array.from(
                { length: job.n * Math.max(1, job.layers) },
                (_, index) => html`<${Preview} key=${index} job=${job} src=${now?.previews?.[index]} />`,
              )
        }
      </div>
      ${
        done &&
        html`
        <${Facts} facts=${{
          Prompt: job.prompt || null,
          Seed: html`<span class="mono">${job.seed}</span>`,
          [makesSound(job.task) ? "Length" : "Size"]: isMesh(job.artifacts[0] ?? {}) ? meshText(job.artifacts[0]) : sizeText(job),
          Steps: job.steps,
          Guidance: job.guidance_scale,
          Waited: duration(job.metrics.queue_ms),
          "Ran for": job.metrics.inference_ms !== null && duration(job.metrics.inference_ms),
          "Batch mates":
            job.batching && (job.batching.max_jobs > 1 ? `up to ${job.batching.max_jobs} jobs in a forward` : "none"),
        }} />
        <div class="actions pad">
          ${
            mayWrite() &&
            html`
            <${Button} kind="primary" icon="dice" action=${() => start(withoutSeed(bodyOf(job, model)))}>Same with another seed<//>
            <${Button} icon="edit" action=${() => edit(bodyOf(job, model))}>Duplicate and edit<//>
            ${canStartFrom(job, model) && html`<${Button} icon="image" action=${() => edit(bodyFromResult(job, model))}>Start from it<//>`}
          `
          }
          ${job.artifacts.length > 0 && html`<${Button} icon="download" action=${() => Promise.all(job.artifacts.map((artifact) => download(job, artifact)))}>Save<//>`}
          <a class="button" href="#/jobs/${job.id}">Open job</a>
        </div>
      `
      }
    <//>
  `;
}

/** Whether another job of the model can start from its first result. */
function canStartFrom(job, model) {
  const kind = job.artifacts[0]?.kind;
  const task = { audio: "audio_to_audio", video: "video_to_video" }[kind];
  return kind === "image" || Boolean(task && model?.tasks.includes(task));
}

function place({ queue, paused_at }) {
  if (!queue) return "Queued.";
  const ahead =
    queue.position === null ? "" : queue.position ? `${plural(queue.position, "job")} ahead. ` : "Next in the queue. ";
  const eta = queue.eta_s ? ` Ready in about ${duration(queue.eta_s * 1_000)}.` : "";
  if (paused_at) return "It is paused.";
  return `${ahead}${queue.reason && queue.reason !== "jobs_ahead" ? REASONS[queue.reason] : ""}${eta}`;
}

const History = ({ all, shown, show }) => html`
  <nav class="history" aria-label="Runs of this tab">
    ${all.map((first) => {
      const job = current(first);
      const label = `${job.status}: ${job.prompt.slice(0, 80)}`;
      return html`
        <button key=${job.id} type="button" aria-label=${label} title=${label} aria-current=${job.id === shown} onClick=${() => show(job.id)}>
          <${Thumb} job=${job} previews=${live.value.jobs.get(job.id)?.previews} size="medium" />
        </button>
      `;
    })}
  </nav>
`;
