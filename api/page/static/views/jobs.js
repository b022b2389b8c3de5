// All jobs of the key's tenant or of the one that an operator names, page by page: filters, a table or a gallery, and actions on those selected or on all that match.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { withQuery } from "../core/api.js";
import { queryOf } from "../core/actions.js";
import { duration, ended, jobHref, plural, sizeText, stateText, words } from "../core/format.js";
import { go, useKeys, useLoaded, useStore } from "../core/hooks.js";
import { current, follow, live, readJobs } from "../core/live.js";
import { mayChange, tenantOf } from "../core/session.js";
import { ArtifactView, Thumb } from "../parts/media.js";
import {
  Ago,
  Badge,
  Button,
  Empty,
  ErrorNote,
  JobLink,
  Panel,
  Segments,
  Skeleton,
} from "../parts/ui.js";
import { FILTERS, Filters } from "./filters.js";
import { JobActions } from "./job_actions.js";

const PAGE = 30;
const EVERY_MS = 5_000;

export function Jobs({ params }) {
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
  const tenant = (filters.tenant = tenantOf(filters.tenant));
  const view = params.get("view") === "gallery" ? "gallery" : "table";
  const after = params.get("after") ?? "";
  const isFiltered = FILTERS.some((name) => filters[name]);
  const change = (changes) =>
    go(withQuery("#/jobs", { ...filters, view: view === "table" ? "" : view, ...changes }), { replace: true });
  const chosen = JSON.stringify([filters, after]);
  const { data, error, loading, reload } = useLoaded(
    (signal) => filled(filters, after, signal),
    [chosen],
    after ? 0 : EVERY_MS,
  );
  useStore(live);
  const [selected, setSelected] = useState(new Set());
  useEffect(() => setSelected(new Set()), [chosen]);
  const list = useRef(null);
  const isHeld = () => selected.size > 0 || list.current?.matches(":hover");
  const { listed, newer, showNewer } = useSteadyRows(data?.data, chosen, isHeld);
  const jobs = listed.map(current);
  const active = jobs
    .filter((job) => !ended(job.status) && !job.tenant) // the stream has the key's own jobs only
    .map((job) => job.id)
    .slice(0, 32);
  useEffect(() => follow(active), [active.join()]);
  const toggle = (id) =>
    setSelected((before) =>
      before.has(id) ? new Set([...before].filter((one) => one !== id)) : new Set([...before, id]),
    );
  useKeys((event) => keyed(event, list.current, toggle, () => change({ view: view === "table" ? "gallery" : "" })));
  const props = { jobs, selected, toggle, setSelected, isOpen: mayChange(tenant) };
  return html`
    <${Filters} filters=${filters} change=${(changes) => change({ ...changes, after: "" })} />
    <div class="toolbar">
      <${Segments} label="Layout" value=${view} options=${[
        ["table", "Table", "table"],
        ["gallery", "Gallery", "gallery"],
      ]} onChange=${(name) => change({ view: name === "table" ? "" : name })} />
      <p class="grow hint" role="status">${data ? shownText(jobs, data, after) : ""}</p>
      ${newer > 0 && html`<${Button} action=${showNewer}>Show ${plural(newer, "newer job")}<//>`}
      ${mayChange(tenant) && html`<${JobActions} jobs=${jobs} selected=${selected} filters=${filters} reload=${reload} />`}
    </div>
    <${ErrorNote} error=${error} retry=${reload} />
    <div ref=${list}>
      ${loading && !data && html`<${Skeleton} rows=${8} />`}
      ${data && !jobs.length && html`<${Panel} title="No jobs"><${Empty} icon="jobs" title=${isFiltered ? "No job matches." : "No jobs yet."}>
        ${data.has_more ? "None among those read so far: go on to older ones." : html`${isFiltered ? "Change the filters, or" : "To see one run,"} <a href="#/playground">send a prompt</a>.`}<//><//>`}
      ${jobs.length > 0 && (view === "table" ? html`<${Table} ...${props} />` : html`<${Gallery} ...${props} />`)}
    </div>
    <nav class="pager" aria-label="Pages">
      ${after && html`<${Button} icon="left" action=${() => change({})}>Newest<//>`}
      ${data?.has_more && html`<${Button} action=${() => go(withQuery("#/jobs", { ...filters, view: view === "table" ? "" : view, after: data.next_cursor }))}>Older<//>`}
    </nav>
  `;
}

/**
 * The jobs to list, and how many newer ones are left out: while `isHeld()` says that rows are in use, those listed
 * before stay where they are, so that none moves from below the pointer.
 */
function useSteadyRows(fresh, chosen, isHeld) {
  const shown = useRef({ chosen, rows: [] });
  const [, setShown] = useState(0);
  const isKnown = fresh && shown.current.chosen === chosen && shown.current.rows.length > 0;
  const steady = isKnown ? steadyRows(shown.current.rows, fresh) : { rows: fresh ?? [], newer: 0 };
  const isSteady = steady.newer > 0 && isHeld();
  shown.current = { chosen, rows: isSteady ? steady.rows : fresh ?? [] };
  const showNewer = () => {
    shown.current = { chosen, rows: [] };
    setShown((before) => before + 1);
  };
  return { listed: shown.current.rows, newer: isSteady ? steady.newer : 0, showNewer };
}

/** The rows of before without deleted ones, and with those that moved up from the next page. */
function steadyRows(rows, fresh) {
  const before = new Set(rows.map(({ id }) => id));
  const now = new Map(fresh.map((job) => [job.id, job]));
  const known = fresh.findIndex(({ id }) => before.has(id));
  const newer = known < 0 ? fresh.length : known;
  const kept = rows.filter(({ id }, at) => now.has(id) || at >= rows.length - newer); // the last ones left the page
  const added = fresh.slice(newer).filter(({ id }) => !before.has(id));
  return { rows: [...kept.map((job) => now.get(job.id) ?? job), ...added], newer };
}

const shownText = (jobs, data, after) =>
  `${plural(jobs.length, "job")}${after ? ", older" : ""}${data.has_more ? ", more on the next page" : ""}`;

/** A page of a filtered list; the service reads a bounded number of jobs a request, so one can be short. */
async function filled(filters, after, signal) {
  const query = { ...queryOf(filters), limit: PAGE, after };
  for (let requests = 1; ; requests += 1) {
    const page = await readJobs(withQuery("v1/jobs", query), { signal });
    const isDone = !page.has_more || page.data.length > 0 || requests === 10;
    if (isDone) return { ...page, data: page.data.map((job) => ({ ...job, tenant: filters.tenant })) };
    query.after = page.next_cursor;
  }
}

function keyed(event, list, toggle, turn) {
  if (event.key === "v") return turn();
  if (event.key === "/") {
    event.preventDefault();
    return document.querySelector(".filters input, .filters select")?.focus();
  }
  const rows = [...(list?.querySelectorAll("[data-job]") ?? [])];
  const row = document.activeElement?.closest("[data-job]");
  const step = { j: 1, k: -1 }[event.key];
  if (step && rows.length) rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(row) + step))].focus();
  if (event.key === "x" && row) toggle(row.dataset.job);
  if (event.key === "Enter" && row === document.activeElement && row) row.querySelector("a").click();
  return undefined;
}

/**
 * The elements of jobs, made again only for those that changed: with 50 of them a click took 96 ms on a busy machine.
 * `make(job, previews)` must use no other values that change, but for `selected`.
 */
function useRows(jobs, selected, make) {
  const before = useRef(new Map());
  const now = new Map();
  for (const job of jobs) {
    const { status, phase, progress, metrics, artifacts } = job;
    const previews = live.value.jobs.get(job.id)?.previews;
    const of = [status, phase, progress.step, metrics.queue_ms, artifacts[0]?.url, selected.has(job.id)].join(" ");
    const known = before.current.get(job.id);
    const isSame = known && known.of === of && known.previews === previews;
    now.set(job.id, isSame ? known : { of, previews, row: make(job, previews) });
  }
  before.current = now;
  return [...now.values()].map(({ row }) => row);
}

function Table({ jobs, selected, toggle, setSelected, isOpen }) {
  const rows = useRows(
    jobs,
    selected,
    (job, previews) => html`
    <tr key=${job.id} data-job=${job.id} tabindex="-1" class=${selected.has(job.id) ? "is-selected" : ""} onClick=${(event) => event.target.closest("a, input, button") || go(jobHref(job))}>
      ${isOpen && html`<td>
        <input type="checkbox" aria-label="Select ${job.id}" checked=${selected.has(job.id)} onChange=${() => toggle(job.id)} /></td>`}
      <td class="prompt"><div><${Thumb} job=${job} previews=${previews} />
        <a class="cut" href=${jobHref(job)} title=${job.prompt}>${job.prompt || words(job.task)}</a></div></td>
      <td><${State} job=${job} /></td>
      <td class="model"><div class="cut" title=${job.model}>${job.model}</div></td>
      <td class="number">${sizeText(job)}${job.n > 1 ? ` · ${job.n}` : ""}</td>
      <td class="number">${duration(job.metrics.queue_ms)}</td>
      <td class="number">${duration(tookMs(job))}</td>
      <td class="nowrap"><${Ago} time=${job.created_at} /></td>
      <td><${JobLink} ...${job} /></td>
    </tr>
    `,
  );
  const all = jobs.every((job) => selected.has(job.id));
  const toggleAll = () => setSelected(all ? new Set() : new Set(jobs.map((job) => job.id)));
  return html`
    <div class="panel scroll" tabindex="0" role="region" aria-label="Jobs">
      <table class="jobs">
        <thead>
          <tr>
            ${isOpen && html`<th scope="col">
              <input type="checkbox" aria-label="Select all on this page" checked=${all} onChange=${toggleAll} /></th>`}
            <th scope="col">Prompt</th><th scope="col">State</th><th scope="col">Model</th>
              <th scope="col" class="number">Size</th><th scope="col" class="number">Waited</th>
              <th scope="col" class="number">Took</th><th scope="col">Created</th><th scope="col">Id</th>
          </tr>
        </thead>
        <tbody>
          ${rows}
        </tbody>
      </table>
    </div>
  `;
}

const tookMs = (job) =>
  job.started_at && job.finished_at ? Date.parse(job.finished_at) - Date.parse(job.started_at) : null;

function State({ job }) {
  if (job.status === "running") return html`<${Badge} state="running">${job.progress.percent}%<//>`;
  return html`<${Badge} state=${job.status}>${stateText(job)}<//>${job.error && html` <span class="hint mono" title=${job.error.code}>${job.error.code}</span>`}`;
}

function Gallery({ jobs, selected, toggle, isOpen }) {
  const images = jobs.flatMap((job) => job.artifacts.map((artifact) => ({ job, artifact })));
  const items = useRows(
    jobs,
    selected,
    (job, previews) => html`
    <li key=${job.id} data-job=${job.id} tabindex="-1" class=${selected.has(job.id) ? "is-selected" : ""}>
      ${job.artifacts.length ? html`<${ArtifactView} job=${job} artifact=${job.artifacts[0]} others=${images} />` : html`<a class="artifact" href=${jobHref(job)} aria-label="Open ${job.id}"><${Thumb} job=${job} previews=${previews} size="large" /></a>`}
      <p class="cut" title=${job.prompt}>${job.prompt || words(job.task)}</p>
      <p class="run-line hint">
        ${isOpen && html`<input type="checkbox" aria-label="Select ${job.id}" checked=${selected.has(job.id)} onChange=${() => toggle(job.id)} />`}<${State} job=${job} /><span class="grow"></span>
        <a href=${jobHref(job)} aria-label="Open ${job.id}">open</a></p>
    </li>
    `,
  );
  return html`
    <ul class="gallery">
      ${items}
    </ul>
  `;
}
