// What the service does now: figures over time, queues, workers with the jobs in their slots, and the latest results.

import { html, useEffect } from "../vendor/htm-preact-3.1.1.js";
import { count, duration, figure, percent, plural } from "../core/format.js";
import { useStore } from "../core/hooks.js";
import { overview, refresh, watchOverview } from "../core/overview.js";
import { mayOperate, mayRead } from "../core/session.js";
import { Tile } from "../parts/charts.js";
import { Icon } from "../parts/icons.js";
import { ArtifactView } from "../parts/media.js";
import { Ago, Badge, Empty, ErrorNote, JobLink, Panel, Skeleton } from "../parts/ui.js";
import { PauseButton } from "./pauses.js";
import { Workers } from "./workers.js";

const newest = ({ samples }) => samples.at(-1) ?? {};

export function Now() {
  const now = useStore(overview);
  useEffect(watchOverview, []);
  if (!now.at && !now.error) return html`<${Skeleton} rows=${6} />`;
  return html`
    <${ErrorNote} error=${now.error} retry=${refresh} />
    <${Tiles} now=${now} />
    <div class="columns now">
      <${Workers} now=${now} />
      <div class="column">
        <${Queues} now=${now} />
        <${Latest} jobs=${now.recent} isBusy=${newest(now).queued + newest(now).running > 0} />
      </div>
    </div>
  `;
}

function Tiles({ now }) {
  const { samples, scale, queues } = now;
  const last = newest(now);
  const jobs = queues?.reduce((sum, queue) => sum + Object.values(queue.jobs).reduce((a, b) => a + b, 0), 0);
  const tiles = [
    queues && {
      name: "Queued",
      value: count(last.queued),
      unit: "slots",
      note: jobs === last.queued ? "" : plural(jobs, "job"),
      lines: [["is-queued", (sample) => sample.queued]],
      format: (value) => figure(value),
    },
    {
      name: "Running",
      value: count(last.running ?? 0),
      unit: "slots",
      note: scale ? `${scale.busy} of ${plural(scale.alive, "worker")} busy` : "",
      lines: [["is-running", (sample) => sample.running]],
      format: (value) => figure(value),
    },
    {
      name: "Images per second",
      value: figure(last.images),
      note: last.steps ? `${figure(last.steps)} steps/s` : "",
      lines: [["is-succeeded", (sample) => sample.images]],
      format: figure,
      least: 0.5,
    },
    {
      name: "Wait, p50 and p95",
      value: duration(last.p50 ?? null),
      note: last.p95 === null || last.p95 === undefined ? "nothing started in a minute" : `p95 ${duration(last.p95)}`,
      lines: [
        ["is-accent", (sample) => sample.p50],
        ["is-faint", (sample) => sample.p95],
      ],
      format: duration,
      least: 100,
    },
    now.workers && {
      name: "Batch fill",
      value: percent(last.fill),
      note: last.fill === null ? "no forwards" : "of the slots in each forward",
      lines: [["is-accent", (sample) => sample.fill]],
      format: percent,
    },
    now.workers && {
      name: "GPU busy",
      value: percent(last.busy),
      note: scale?.wanted > scale?.alive ? `${plural(scale.wanted, "worker")} wanted` : "of the engines' time",
      lines: [["is-accent", (sample) => sample.busy]],
      format: percent,
    },
  ];
  return html`
    <section class="tiles" aria-label="Figures over time">
      ${tiles.filter(Boolean).map((tile) => html`<${Tile} key=${tile.name} samples=${samples} ...${tile} />`)}
    </section>
  `;
}

/** Why a signature's jobs wait, as far as the workers and its depth say. */
function readiness(queue, workers) {
  const queued = Object.values(queue.jobs).reduce((a, b) => a + b, 0);
  if (queue.paused && queued) return ["paused", "paused"];
  if (!queued) return ["running", "running"];
  const serving = workers?.filter((worker) => worker.models.includes(queue.model)) ?? [];
  if (!serving.length) return ["failed", "no worker"];
  if (serving.every((worker) => worker.unavailable[queue.model])) return ["failed", "model unavailable"];
  if (serving.every((worker) => worker.state === "starting")) return ["queued", "worker starts"];
  if (serving.every((worker) => worker.state === "draining")) return ["queued", "workers drain"];
  if (!serving.some((worker) => worker.loaded.includes(queue.model))) return ["queued", "model loads"];
  if (!serving.some((worker) => worker.free_slots > 0)) return ["queued", "slots full"];
  return queue.running_jobs ? ["running", "joining"] : ["running", "ready"];
}

const HELD = ["paused", "failed"]; // without an end that is known

/** The shape in a signature, `model:shape:digest`, without the 1 frame of an image. */
const shapeOf = ({ signature, model }) =>
  signature
    .slice(model.length + 1)
    .split(":")[0]
    .replace(/x1$/, "");

function Queues({ now }) {
  if (!now.queues) return null;
  const most = Math.max(1, ...now.queues.map((queue) => Object.values(queue.slots).reduce((a, b) => a + b, 0)));
  return html`
    <${Panel} title="Queues" note=${now.queues.length ? plural(now.queues.length, "signature") : ""} actions=${html`<${PauseButton} />`}>
      ${
        !now.queues.length
          ? html`<${Empty} icon="jobs" title="Nothing is queued.">Jobs that can share forwards wait here, one row a signature.<//>`
          : html`
            <div class="scroll" tabindex="0" role="region" aria-label="Signatures">
              <table class="dense">
                <thead><tr><th scope="col">Signature</th><th scope="col">Depth</th>
                  <th scope="col" class="number">Running</th><th scope="col" class="number">Oldest</th>
                  <th scope="col">State</th></tr></thead>
                <tbody>
                  ${now.queues.slice(0, 50).map((queue) => {
                    const [state, text] = readiness(queue, now.workers);
                    const priorities = Object.entries(queue.slots).filter(([, slots]) => slots);
                    return html`
                      <tr key=${queue.signature}>
                        <td><span class="signature" title=${queue.signature}><span class="strong">${queue.model}
                          </span> <span class="mono hint">${shapeOf(queue)}</span></span></td>
                        <td>
                          <div class="depth" title=${priorities.map(([name, slots]) => `${name} ${slots}`).join(", ") || "none"}>
                            <span class="number">${count(priorities.reduce((sum, [, slots]) => sum + slots, 0))}</span>
                            <div>${priorities.map(([name, slots]) => html`<i key=${name} class="is-${name}" style=${{ width: `${(100 * slots) / most}%` }}></i>`)}</div>
                          </div>
                        </td>
                        <td class="number">${count(queue.running_jobs)}</td>
                        <td class="number">${queue.oldest_age_ms === null ? "–" : duration(queue.oldest_age_ms)}</td>
                        <td class="nowrap"><${Badge} state=${state}>${text}<//>
                          ${queue.eta_s && !HELD.includes(state) ? html`<span class="hint eta">
                          ${duration(queue.eta_s * 1_000)} left</span>` : ""}</td>
                      </tr>
                    `;
                  })}
                </tbody>
              </table>
            </div>
            <p class="legend"><i class="is-interactive"></i>interactive <i class="is-standard">
              </i>standard <i class="is-bulk"></i>bulk</p>
          `
      }
    <//>
  `;
}

function Latest({ jobs, isBusy }) {
  if (!mayRead()) return null;
  const images = jobs.flatMap((job) => job.artifacts.map((artifact) => ({ job, artifact }))).slice(0, 18);
  const failed = jobs.filter((job) => job.status === "failed").slice(0, 4);
  return html`
    <${Panel} title="Latest results" actions=${html`<a class="more" href="#/jobs">All jobs <${Icon} name="right" size=${14} /></a>`}>
      ${
        !images.length && !failed.length
          ? html`<${Empty} icon="image" title="No results yet.">
            ${isBusy ? "The first images appear here." : html`Send a prompt and see it made, step by step.<br />
              <a class="button primary" href="#/playground">Open the playground</a>`}<//>`
          : html`
            ${
              images.length > 0 &&
              html`<div class="strip">
                ${images.map((one) => html`<${ArtifactView} key=${one.artifact.url} ...${one} others=${images} />`)}
              </div>`
            }
            ${failed.map(
              (job) => html`
                <p key=${job.id} class="line">
                  <${Badge} state="failed" /> <${JobLink} id=${job.id} /> <span class="grow cut">${job.error?.message}
                  </span> <${Ago} time=${job.finished_at} /></p>
              `,
            )}
          `
      }
    <//>
  `;
}

export const nowTitle = () => (mayOperate() ? "Now" : "Now: your jobs");
