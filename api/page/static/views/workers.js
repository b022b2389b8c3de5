// Workers with their slots: each running job with its step and its latest preview.

import { html } from "../vendor/htm-preact-3.1.1.js";
import { bytes, mediumOf, NAMES, plural, sizeText, words } from "../core/format.js";
import { useStore } from "../core/hooks.js";
import { current, live } from "../core/live.js";
import { cancelJob } from "../core/actions.js";
import { mayRead, mayWrite, session } from "../core/session.js";
import { Thumb } from "../parts/media.js";
import { Badge, Button, Empty, JobLink, Panel, Progress } from "../parts/ui.js";

const MOST_ROWS = 24; // of one worker: the others are a number
const HUES = 8;

export function Workers({ now }) {
  const { jobs } = useStore(live);
  const running = now.running.map(current).filter((job) => job.status === "running");
  const workers = now.workers ?? [];
  const at = (job) => jobs.get(job.id)?.worker;
  const elsewhere = running.filter((job) => !workers.some((worker) => worker.id === at(job)));
  return html`
    <${Panel} kind="workers" title=${now.workers ? "Workers" : "Running"} note=${now.workers ? "" : plural(running.length, "job")}>
      ${now.workers && !workers.length && html`<${Empty} icon="worker" title="No worker is alive.">Start one with <code>fusequeue worker</code>; <code>fusequeue doctor</code> says what is missing.<//>`}
      ${workers.map((worker) => html`<${Worker} key=${worker.id} worker=${worker} running=${running.filter((job) => at(job) === worker.id)} jobs=${jobs} />`)}
      ${!now.workers && !running.length && html`<${Empty} icon="now" title="None of your jobs is running.">
        <a href="#/playground">Send a prompt</a> to see one.<//>`}
      ${elsewhere.length > 0 && html`<${Rows} running=${elsewhere} jobs=${jobs} />`}
    <//>
  `;
}

const STATES = { ready: "succeeded", starting: "queued", draining: "expired", unavailable: "failed" };
const IDLE = {
  ready: "Idle: it claims a job as soon as one is ready.",
  starting: "It starts: it claims jobs when its models are checked.",
  draining: "It stops: it claims no more jobs.",
};

function Worker({ worker, running, jobs }) {
  const others = worker.running_jobs - running.length;
  const troubles = Object.entries(worker.unavailable);
  return html`
    <article class="worker" aria-label="Worker ${worker.id}">
      <header>
        <${Badge} state=${STATES[worker.state]}>${worker.state}<//>
        <span class="strong cut" title=${worker.id}>${worker.host || worker.id}</span>
        <span class="hint">${worker.device}${worker.models_bytes ? ` · ${bytes(worker.models_bytes)} of models` : ""}
          </span>
        <span class="hint grow cut">${worker.loaded.length ? `loaded: ${worker.loaded.join(", ")}` : "nothing loaded"}
          </span>
        <span class="number strong">${worker.running_slots}<span class="hint"> of ${plural(worker.slots, "slot")}
          </span></span>
      </header>
      <${Slots} worker=${worker} running=${running} />
      ${troubles.map(([model, trouble]) => html`<p key=${model} class="fault">
        ${model}: ${trouble.reason ?? trouble.error ?? "unavailable"}</p>`)}
      ${worker.models_fault && html`<p class="fault">
        The changed models file is not in use: ${worker.models_fault}</p>`}
      ${running.length > 0 && html`<${Rows} running=${running} jobs=${jobs} />`}
      ${others > 0 && session.value.hasKey && html`<p class="hint">
        ${plural(others, "job")} of other tenants, or just started</p>`}
      ${!worker.running_jobs && IDLE[worker.state] && html`<p class="hint idle">${IDLE[worker.state]}</p>`}
    </article>
  `;
}

/** One cell for each slot; those of a job have one colour. */
function Slots({ worker, running }) {
  const cells = running.flatMap((job) => Array.from({ length: job.n }, () => job));
  const rest = Math.max(0, worker.running_slots - cells.length);
  const all = [...cells, ...Array(rest).fill("other")];
  const free = Math.max(0, worker.slots - all.length);
  return html`
    <div class="slots" role="img" aria-label="${worker.running_slots} of ${worker.slots} slots are in use">
      ${all
        .slice(0, 64)
        .map((job, index) =>
          job === "other"
            ? html`<i key=${`o${index}`} class="other"></i>`
            : html`<i key=${job.id + index} class="hue-${hue(job)}" title=${job.prompt}>
              <b style=${{ height: `${job.progress.percent}%` }}></b></i>`,
        )}
      ${Array.from({ length: Math.min(free, 64) }, (_, index) => html`<i key=${`f${index}`} class="free"></i>`)}
    </div>
  `;
}

/** A colour of the job's own, from its random id. */
const hue = (job) => [...job.id.slice(-3)].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % HUES;

function Rows({ running, jobs }) {
  const shown = running.slice(0, MOST_ROWS);
  return html`
    <ul class="runs">
      ${shown.map((job) => html`<${Run} key=${job.id} job=${job} previews=${jobs.get(job.id)?.previews ?? []} />`)}
      ${running.length > shown.length && html`<li class="hint">and ${plural(running.length - shown.length, "more job")}</li>`}
    </ul>
  `;
}

function Run({ job, previews }) {
  const { step, total, percent } = job.progress;
  return html`
    <li class="run hue-${hue(job)}">
      <${Thumb} job=${job} previews=${previews} />
      <div class="grow">
        <p class="run-line"><span class="cut grow" title=${job.prompt}>${mayRead() ? job.prompt || words(job.task) : ""}</span>
          <span class="number hint">${job.n > 1 ? `${job.n} ${NAMES[mediumOf(job.task)].toLowerCase()} · ` : ""}${sizeText(job)}</span></p>
        <${Progress} value=${percent} label="Steps of ${job.id}" />
        <p class="run-line hint"><${JobLink} id=${job.id} /><span class="priority">${job.priority}</span><span class="grow">
          ${job.cancel_requested ? "stops at its next step" : words(job.phase ?? "starting")}</span>
          <span class="number">${total ? `step ${step} of ${total}` : ""}</span></p>
      </div>
      ${mayWrite() && html`<${Button} kind="quiet" icon="cancel" label="Cancel ${job.id}" action=${() => cancelJob(job.id)} />`}
    </li>
  `;
}
