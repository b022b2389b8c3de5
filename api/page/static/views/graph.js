// The graph of a job: the jobs that it waits for, those that wait for it, and all that are connected with these.

import { html, useEffect, useRef } from "../vendor/htm-preact-3.1.1.js";
import { withQuery } from "../core/api.js";
import { duration, ended, jobHref, oneUnit, plural, shortId, stateText, words } from "../core/format.js";
import { arrange } from "../core/graph.js";
import { useLoaded, useStore } from "../core/hooks.js";
import { current, follow, live, readJobs } from "../core/live.js";
import { Thumb } from "../parts/media.js";
import { Badge, Panel } from "../parts/ui.js";

const NODE = { width: 188, height: 58 }; // three columns fit beside the request on 1440 pixels
const GAP = { x: 28, y: 12 };
const OPEN_MS = 3_000;
const ENDED_MS = 15_000; // others can be submitted that wait for them

/** The jobs that are connected with one, itself first; empty until they are read. The own ones are followed. */
export function useGraph(id, tenant) {
  const isOpen = useRef(true);
  const path = withQuery("page/graph", { job: id, tenant });
  const { data } = useLoaded((signal) => readJobs(path, { signal }), [path], isOpen.current ? OPEN_MS : ENDED_MS);
  useStore(live);
  const jobs = (data?.data ?? []).map((job) => ({ ...job, ...current(job), tenant }));
  const open = jobs.filter((job) => !ended(job.status)).map((job) => job.id);
  isOpen.current = !data || open.length > 0;
  useEffect(() => (tenant ? undefined : follow(open)), [open.join(), tenant]);
  return { jobs, has_more: data?.has_more ?? false };
}

const left = ({ column }) => column * (NODE.width + GAP.x);
const top = ({ row }) => row * (NODE.height + GAP.y);

/** The picture of a graph of several jobs, with columns from left to right. */
export function GraphPanel({ id, graph }) {
  const { nodes, arrows, columns, rows } = arrange(graph.jobs);
  const own = nodes.find(({ job }) => job.id === id);
  const frame = useRef(null);
  const at = own ? `${left(own)} ${top(own)}` : "";
  useEffect(() => {
    if (!own || !frame.current) return;
    const { clientWidth, clientHeight } = frame.current;
    frame.current.scrollTo(left(own) - (clientWidth - NODE.width) / 2, top(own) - (clientHeight - NODE.height) / 2);
  }, [id, at]);
  if (nodes.length < 2) return null;
  const width = columns * (NODE.width + GAP.x) - GAP.x;
  const height = rows * (NODE.height + GAP.y) - GAP.y;
  const note = graph.has_more ? `the nearest ${nodes.length} jobs` : plural(nodes.length, "job");
  return html`
    <${Panel} title="Graph" note=${note} actions=${graph.has_more && html`<a class="button" href=${withQuery("#/jobs", { parent: id, tenant: own?.job.tenant })}>Its children</a>`}>
      <div class="graph" ref=${frame}>
        <div class="graph-picture" style=${{ width: `${width}px`, height: `${height}px` }}>
          <svg width=${width} height=${height} aria-hidden="true">
            ${arrows.map((arrow) => html`<path key=${`${arrow.from.job.id} ${arrow.to.job.id}`} class="is-${arrow.from.job.status}" d=${line(arrow)} />`)}
          </svg>
          <ul aria-label="Jobs of the graph, those that are waited for first">
            ${nodes.map((node) => html`<${Node} key=${node.job.id} node=${node} isOwn=${node === own} />`)}
          </ul>
        </div>
      </div>
    <//>
  `;
}

/** A line from the right of a job to the left of its child, with an arrowhead. */
function line({ from, to }) {
  const start = [left(from) + NODE.width, top(from) + NODE.height / 2];
  const end = [left(to) - 2, top(to) + NODE.height / 2];
  const bend = GAP.x / 2;
  return `M${start} C${start[0] + bend} ${start[1]} ${end[0] - bend} ${end[1]} ${end} m-6 -4 l6 4 l-6 4`;
}

/** When a queued job is expected to end, as far as that is known. */
const timeLeft = ({ status, queue }) =>
  status === "queued" && queue?.eta_s
    ? html`<span class="hint number" title="It should end in about ${duration(queue.eta_s * 1_000)}.">${oneUnit(queue.eta_s, Math.ceil)}<span class="unseen"> until its end</span></span>`
    : "";

function Node({ node, isOwn }) {
  const { job, parents } = node;
  return html`
    <li style=${{ left: `${left(node)}px`, top: `${top(node)}px`, width: `${NODE.width}px`, height: `${NODE.height}px` }}>
      <a class="node" href=${jobHref(job)} title=${job.prompt || words(job.task)} aria-current=${isOwn ? "true" : undefined}>
        <${Thumb} job=${job} previews=${live.value.jobs.get(job.id)?.previews} />
        <span class="node-text">
          <span class="node-state"><${Badge} state=${job.status}>${stateText(job)}<//>${timeLeft(job)}</span>
          <span class="cut">${job.prompt || words(job.task)}</span>
          <span class="unseen">${shortId(job.id)}${parents.length > 0 && `, after ${parents.map(({ id }) => shortId(id)).join(" and ")}`}</span>
        </span>
      </a>
    </li>
  `;
}
