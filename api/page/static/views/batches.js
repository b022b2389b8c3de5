// Batches of files: progress, time left, files, and errors by code.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { call, request, serverNow, withQuery } from "../core/api.js";
import { save } from "../core/actions.js";
import { count, duration, plural, words } from "../core/format.js";
import { go, useLoaded } from "../core/hooks.js";
import { mayWrite } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Ago, Badge, Button, Copy, Empty, ErrorNote, Facts, Panel, Progress, Skeleton } from "../parts/ui.js";

const PAGE = 20;
const MOST_ERROR_BYTES = 1_000_000; // of an error file that are counted
const STATES = {
  completed: "succeeded",
  failed: "failed",
  expired: "expired",
  cancelled: "canceled",
  cancelling: "canceled",
  validating: "queued",
};
const OPEN = ["validating", "in_progress", "finalizing", "cancelling"];

export function Batches({ params }) {
  const after = params.get("after") ?? "";
  const { data, error, loading, reload } = useLoaded(
    (signal) => call(withQuery("v1/batches", { limit: PAGE, after }), { signal }),
    [after],
    3_000,
  );
  const batches = data?.data ?? [];
  return html`
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${4} />`}
    ${
      data &&
      !batches.length &&
      html`
      <${Panel} title="No batches">
        <${Empty} icon="batches" title="A batch is thousands of requests in one file.">
          They run at priority bulk, in the slots that other jobs leave free: <code>client.batches.create</code> of the Python client or of OpenAI's SDK, or <code>POST /v1/batches</code>.
        <//>
      <//>
    `
    }
    <div class="stack">${batches.map((batch) => html`<${Batch} key=${batch.id} batch=${batch} reload=${reload} />`)}
      </div>
    <nav class="pager" aria-label="Pages">
      ${after && html`<${Button} icon="left" action=${() => go("#/batches")}>Newest<//>`}
      ${data?.has_more && html`<${Button} action=${() => go(`#/batches?after=${encodeURIComponent(data.last_id)}`)}>Older<//>`}
    </nav>
  `;
}

/** Milliseconds until a batch ends, from its rate so far. */
function timeLeft({ request_counts: { total, completed, failed }, in_progress_at, status }) {
  const done = completed + failed;
  if (status !== "in_progress" || !done || !in_progress_at) return null;
  return ((serverNow() - in_progress_at * 1_000) * (total - done)) / done;
}

function Batch({ batch, reload }) {
  const { total, completed, failed } = batch.request_counts;
  const state = STATES[batch.status] ?? "running";
  const left = timeLeft(batch);
  const cancel = async () => {
    const run = async () => (await call(`v1/batches/${batch.id}/cancel`, { method: "POST" }), true);
    await confirm({
      title: "Cancel this batch?",
      text: "Finished results are kept; running jobs stop at their next step.",
      verb: "Cancel the batch",
      danger: true,
      run,
    });
    reload();
  };
  const ended = batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at;
  return html`
    <article class="panel batch" aria-label="Batch ${batch.id}">
      <header>
        <${Badge} state=${state}>${words(batch.status)}<//>
        <h2 class="mono">${batch.id}</h2><${Copy} text=${batch.id} label="Copy the id" />
        <span class="grow"></span>
        <span class="number">${count(completed)} of ${plural(total, "line")}${failed ? html`, <span class="fault">
          ${count(failed)} failed</span>` : ""}</span>
        ${mayWrite() && OPEN.includes(batch.status) && html`<${Button} icon="cancel" action=${cancel} disabled=${batch.status === "cancelling"}>Cancel<//>`}
      </header>
      <${Progress} value=${total ? (100 * (completed + failed)) / total : 0} label="Lines of ${batch.id}" state=${state} />
      <${Facts} facts=${{
        Endpoint: html`<code>${batch.endpoint}</code>`,
        Created: html`<${Ago} time=${batch.created_at * 1_000} />`,
        "Time left": left !== null && `about ${duration(left)}`,
        Took: ended && duration((ended - batch.created_at) * 1_000),
        Jobs: html`<a href="#/jobs?batch_id=${batch.id}">its jobs</a>`,
      }} />
      <div class="files">
        <${File} id=${batch.input_file_id} name="Input" />
        <${File} id=${batch.output_file_id} name="Results" />
        <${File} id=${batch.error_file_id} name="Errors" />
      </div>
      ${batch.errors && html`<ul class="plain">
        ${batch.errors.data.slice(0, 20).map((fault) => html`<li key=${`${fault.line}${fault.message}`}><code>
        ${fault.code}</code> ${fault.line ? `line ${fault.line}: ` : ""}${fault.message}</li>`)}</ul>`}
      ${batch.error_file_id && html`<${ErrorCodes} id=${batch.error_file_id} />`}
    </article>
  `;
}

const File = ({ id, name }) =>
  id &&
  html`
    <${Button} icon="download" action=${async () => save(await (await request(`v1/files/${id}/content`)).blob(), `${id}.jsonl`)}>${name}<//>
  `;

/** How often each error occurs, read when it is asked for. */
function ErrorCodes({ id }) {
  const [codes, setCodes] = useState(null);
  const read = async () => {
    const response = await request(`v1/files/${id}/content`, { headers: { Range: `bytes=0-${MOST_ERROR_BYTES - 1}` } });
    const found = new Map();
    for (const line of (await response.text()).split("\n")) {
      const code = codeOf(line);
      if (code) found.set(code, (found.get(code) ?? 0) + 1);
    }
    setCodes([...found].sort((a, b) => b[1] - a[1]));
  };
  if (!codes) return html`<p><${Button} action=${read}>Errors by code<//></p>`;
  return html`<ul class="plain" aria-label="Errors by code">${codes.map(([code, times]) => html`<li key=${code}><code>
    ${code}</code> <span class="strong number">${count(times)}</span></li>`)}</ul>`;
}

function codeOf(line) {
  try {
    const row = JSON.parse(line);
    return row.error?.code ?? row.response?.body?.error?.code ?? row.response?.body?.code ?? "other";
  } catch {
    return null; // an empty line, or one cut off at the end
  }
}
