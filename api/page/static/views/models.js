// The models: what they can do, the workers that have them in memory, what their forwards cost, defaults and limits.

import { html, useEffect } from "../vendor/htm-preact-3.1.1.js";
import { call } from "../core/api.js";
import { duration, makesSound, makesVideo, mediumOf, NAMES, plural, words } from "../core/format.js";
import { useLoaded, useStore } from "../core/hooks.js";
import { memoryState, orderModel } from "../core/model_orders.js";
import { overview, watchOverview } from "../core/overview.js";
import { mayOperate, mayWrite } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Badge, Button, Empty, ErrorNote, Facts, Panel, Skeleton, toast } from "../parts/ui.js";
import { Costs } from "./costs.js";
import { PauseButton } from "./pauses.js";

export function Models() {
  const { data, error, loading, reload } = useLoaded((signal) => call("v1/models", { signal }), []);
  const costs = useLoaded((signal) => (mayOperate() ? call("v1/cost-curves", { signal }) : null), [], 30_000);
  const { workers, queues } = useStore(overview);
  useEffect(watchOverview, []);
  const curvesOf = (id) => (costs.data?.data ?? []).filter((curve) => curve.model === id);
  return html`
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${4} />`}
    ${data && !data.data.length && html`<${Panel} title="No models">
      <${Empty} icon="models" title="No models.">List them in models.toml.<//><//>`}
    <div class="cards">${(data?.data ?? []).map((model) => html`<${Model} key=${model.id} model=${model} curves=${curvesOf(model.id)} workers=${workers} queues=${queues} />`)}</div>
  `;
}

const range = (least, most) => (least === most ? String(most) : `${least} to ${most}`);

const ONE = { image: "an image", video: "a video", audio: "a sound", mesh: "a mesh" };

function Model({ model, curves, workers, queues }) {
  const { defaults, limits } = model;
  const sound = model.tasks.every(makesSound);
  const video = model.tasks.some(makesVideo);
  const mesh = model.tasks.includes("image_to_mesh");
  const waiting = queues
    ?.filter((queue) => queue.model === model.id)
    .reduce((sum, queue) => sum + Object.values(queue.jobs).reduce((a, b) => a + b, 0), 0);
  return html`
    <article class="panel model" aria-label="Model ${model.id}">
      <header>
        <h2>${model.id}</h2><span class="grow"></span>
        <${PauseButton} kind="model" name=${model.id} />
        ${mayWrite() && html`<a class="button primary" href="#/playground?model=${encodeURIComponent(model.id)}">Try it</a>`}
      </header>
      <p class="tags">${model.tasks.map((task) => html`<span key=${task} class="tag">${words(task)}</span>`)}</p>
      ${mayOperate() && workers && html`<${Orders} model=${model.id} workers=${workers} />`}
      ${mayOperate() && workers && html`<${Holders} model=${model} workers=${workers} waiting=${waiting} />`}
      ${mayOperate() && html`<${Costs} curves=${curves} noun=${ONE[mediumOf(model.tasks[0])]} />`}
      <${Facts} facts=${{
        Length: sound && `${defaults.duration_s} s; ${range(limits.min_duration_s, limits.max_duration_s)}`,
        Size: !sound && !mesh && `${defaults.width} × ${defaults.height}; sides ${range(limits.min_side, limits.max_side)}, multiples of ${limits.multiple_of}`,
        Steps: `${defaults.steps}; ${range(limits.min_steps, limits.max_steps)}`,
        Guidance: `${defaults.guidance_scale}; up to ${limits.max_guidance_scale}`,
        Strength: model.tasks.some((task) => ["image_to_image", "inpaint", "audio_to_audio"].includes(task)) && defaults.strength,
        Frames:
          video &&
          `${defaults.frames} at ${defaults.fps} fps; ${range(limits.min_frames, limits.max_frames)}, multiples of ${limits.frames_multiple} plus one`,
        [NAMES[mediumOf(model.tasks[0])]]: `up to ${limits.max_images} a job, ${plural(model.max_batch, "row")} a forward`,
        Prompt: !mesh && `up to ${limits.max_prompt_chars} characters${model.prompt_syntax === "weights" ? "; (word:1.3), [word] and BREAK" : ""}`,
        Schedulers: model.schedulers.join(", ") || "the model's own",
        Adapters: model.adapters.map(({ id, token, scale }) => `${id} (${token ?? scale})`).join(", "),
        Controls: model.controls.map((control) => `${control.id} (${words(control.kind)})`).join(", "),
        Refiner: model.refiner && `from ${model.refiner.start} of the steps`,
        "Step cache": [
          model.step_cache.default,
          ...model.step_cache.allowed.filter((level) => level !== model.step_cache.default),
        ].join(", "),
        "Mixed in a forward": model.mixed_fields.join(", "),
        "Waits for batch mates": `up to ${model.window_ms} ms`,
      }} />
    </article>
  `;
}

const ORDERS = {
  load: ["Load", "Workers load it before jobs ask for it. Those without room evict others, after their running jobs."],
  unload: ["Unload", "Workers free its memory after its running jobs. A queued job of it loads it again."],
  pin: ["Pin", "Workers load it and keep it in memory, also those that start later, until it is unpinned."],
  unpin: ["Unpin", "It stays in memory until another model needs it."],
};

/** Buttons that load, unload, pin and unpin a model on all workers, or on those of a pool. */
function Orders({ model, workers }) {
  const pools = [...new Set(workers.map((worker) => worker.worker_pool))].sort();
  const ask = async (action) => {
    const [verb, text] = ORDERS[action];
    const options = [["", "all"], ...pools.map((pool) => [pool, pool])];
    const run = async (_progress, _signal, pool) => (await orderModel(model, action, pool), true);
    const choose = { label: "Worker pool", value: "", options };
    if (await confirm({ title: `${verb} ${model}?`, text, verb, run, choose })) toast(`${verb}: ${model}`);
  };
  return html`<p class="tags" role="group" aria-label="Memory of workers">
    ${Object.keys(ORDERS).map((action) => html`<${Button} key=${action} action=${() => ask(action)}>${ORDERS[action][0]}<//>`)}
  </p>`;
}

/** Why a worker cannot load the model, whether that passes, and when it tries again. */
const Trouble = ({ trouble }) =>
  trouble &&
  html`<p class="fault">${trouble.reason.replace(/\.$/, "")}; ${trouble.permanent ? "correct its entry, which is tried at once, or its files: " : ""}next try in ${duration(1_000 * trouble.retry_in_s)}.</p>`;

function Holders({ model, workers, waiting }) {
  const serving = workers.filter((worker) => worker.models.includes(model.id));
  return html`
    <ul class="plain holders" aria-label="Workers">
      ${serving.slice(0, 12).map((worker) => {
        const [kind, text] = memoryState(worker, model.id);
        return html`<li key=${worker.id}><${Badge} state=${kind}>${text}<//> <span title=${worker.id}>
          ${worker.host || worker.id}</span> <span class="hint">${worker.device}</span>
          <${Trouble} trouble=${worker.unavailable[model.id]} /></li>`;
      })}
      ${serving.length > 12 && html`<li class="hint">and ${plural(serving.length - 12, "more worker")}</li>`}
      ${!serving.length && html`<li><${Badge} state="failed">no worker serves it<//></li>`}
      ${waiting > 0 && html`<li class="hint">${plural(waiting, "job")} queued</li>`}
    </ul>
  `;
}
