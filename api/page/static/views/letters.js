// Dead letters: jobs that failed permanently, why, and what to do about them.

import { html, useEffect, useState } from "../vendor/htm-preact-3.1.1.js";
import { call, serverNow, withQuery } from "../core/api.js";
import { changeMatching, countMatching, each } from "../core/actions.js";
import { jobHref, plural, remedy, words, sizeText } from "../core/format.js";
import { go, useLoaded } from "../core/hooks.js";
import { mayOperate } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Ago, Badge, Button, Coded, Copy, Empty, ErrorNote, Panel, Skeleton, toast, toastError } from "../parts/ui.js";
import { Typed } from "./filters.js";

const PAGE = 50;
const FILTERS = ["reason", "model", "tenant"];
const CAUSE = "The workers' logs have its id and the reason.";

export function DeadLetters({ params }) {
  const after = params.get("after") ?? "";
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
  const filtered = FILTERS.some((name) => filters[name]);
  const query = withQuery("v1/dead-letters", { ...filters, limit: PAGE, after });
  const { data, error, loading, reload } = useLoaded((signal) => call(query, { signal }), [query], 5_000);
  const [selected, setSelected] = useState(new Set());
  useEffect(() => setSelected(new Set()), [query]);
  const letters = data?.data ?? [];
  const chosen = letters.filter((letter) => selected.has(letter.id));
  const toggle = (id) =>
    setSelected((before) =>
      before.has(id) ? new Set([...before].filter((one) => one !== id)) : new Set([...before, id]),
    );
  const all = letters.length > 0 && letters.every((letter) => selected.has(letter.id));
  const props = { reload, setSelected };
  const change = (changes) => go(withQuery("#/dead-letters", { ...filters, ...changes }), { replace: true });
  return html`
    <form class="filters" role="search" aria-label="Filter the dead letters" onSubmit=${(event) => event.preventDefault()}>
      ${FILTERS.map((name) => html`<${Typed} key=${name} label=${LABELS[name]} name=${name} placeholder="any" filters=${filters} change=${change} />`)}
    </form>
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${4} />`}
    ${data && !letters.length && html`<${Panel} title="No dead letters"><${Empty} icon="check" title=${filtered ? "No dead letter matches." : "No job has failed permanently."}>
      ${data.has_more ? "None among those read so far: go on to older ones." : "A job comes here after it took several workers with it."}<//><//>`}
    ${
      letters.length > 0 &&
      html`
      <div class="toolbar">
        ${mayOperate() && html`<label class="check">
          <input type="checkbox" checked=${all} onChange=${() => setSelected(all ? new Set() : new Set(letters.map((letter) => letter.id)))} /> Select all on this page</label>`}
        <p class="grow hint" role="status">
          ${plural(letters.length, "dead letter")}${data.has_more ? ", more on the next page" : ""}</p>
        ${mayOperate() && (chosen.length ? html`<${Many} chosen=${chosen} ...${props} />` : html`<${All} filters=${filters} filtered=${filtered} reload=${reload} />`)}
      </div>
      <div class="stack">${letters.map((letter) => html`<${Letter} key=${letter.id} letter=${letter} selected=${selected.has(letter.id)} toggle=${toggle} ...${props} />`)}</div>
    `
    }
    <nav class="pager" aria-label="Pages">
      ${after && html`<${Button} icon="left" action=${() => change({})}>Newest<//>`}
      ${data?.has_more && html`<${Button} action=${() => go(withQuery("#/dead-letters", { ...filters, after: data.next_cursor }))}>Older<//>`}
    </nav>
  `;
}

const LABELS = { reason: "Reason", model: "Model", tenant: "Tenant" };

const QUESTIONS = {
  redrive: { verb: "Redrive", past: "Redrove", text: "The jobs are queued again with their attempts reset." },
  purge: {
    verb: "Purge",
    past: "Purged",
    text: "The dead letters and the records of their jobs are deleted for good.",
    danger: true,
  },
};

/** What can be done to all dead letters that match; without a filter, to all until now. */
function All({ filters, filtered, reload }) {
  const on = (action) => async () => {
    const { past, ...question } = QUESTIONS[action];
    const query = { ...filters, at_before: new Date(serverNow()).toISOString() };
    const done = await confirm({
      title: `${question.verb} all dead letters${filtered ? " that match" : ""}?`,
      noun: "dead letter",
      ...question,
      count: (signal) => countMatching(action, query, { signal }),
      run: (progress, signal) => changeMatching(action, query, { progress, signal }),
    });
    if (done !== null) toast(`${past} ${plural(done, "dead letter")}`);
    reload();
  };
  return html`
    <div class="actions">
      <${Button} icon="redo" action=${on("redrive")}>${filtered ? "Redrive all matching" : "Redrive all"}<//>
      <${Button} icon="trash" action=${on("purge")}>${filtered ? "Purge all matching" : "Purge all"}<//>
    </div>
  `;
}

const path = (id) => `v1/dead-letters/${encodeURIComponent(id)}`;
const redrive = (id) => call(`${path(id)}/redrive`, { method: "POST" });
const purge = (id) => call(path(id), { method: "DELETE" });

function Many({ chosen, reload, setSelected }) {
  const finish = ({ done, failure }, verb) => {
    if (failure) toastError(failure);
    else toast(`${verb} ${plural(done, "dead letter")}`);
    setSelected(new Set());
    reload();
  };
  const ask = (name, action, ids) => async () => {
    const { past, ...question } = QUESTIONS[name];
    const outcome = await confirm({
      title: `${question.verb} the selected dead letters?`,
      noun: "dead letter",
      ...question,
      count: () => ({ total: ids.length }),
      run: (progress, signal) => each(ids, action, progress, signal),
    });
    if (outcome) finish(outcome, past);
  };
  const every = chosen.map((letter) => letter.id);
  const drivable = chosen.filter((letter) => letter.job).map((letter) => letter.id);
  return html`
    <div class="actions">
      <span class="hint">${chosen.length} selected</span>
      <${Button} icon="redo" disabled=${!drivable.length} action=${ask("redrive", redrive, drivable)}>Redrive ${drivable.length}<//>
      <${Button} icon="trash" action=${ask("purge", purge, every)}>Purge ${every.length}<//>
    </div>
  `;
}

function Letter({ letter, selected, toggle, reload }) {
  const { job } = letter;
  const again = async () => {
    await redrive(letter.id);
    toast("Queued the job again");
    reload();
  };
  const remove = async () => {
    const run = async () => (await purge(letter.id), true);
    const done = await confirm({
      title: "Purge this dead letter?",
      text: "It and the record of its job are deleted for good.",
      verb: "Purge",
      danger: true,
      run,
    });
    if (done) toast("Purged the dead letter");
    reload();
  };
  return html`
    <article class="panel letter" aria-label="Dead letter ${letter.id}">
      <header>
        ${mayOperate() && html`<input type="checkbox" aria-label="Select ${letter.id}" checked=${selected} onChange=${() => toggle(letter.id)} />`}
        <${Badge} state="failed">${words(letter.reason)}<//>
        <h2 class="mono cut"><a href=${jobHref(letter)}>${letter.id}</a></h2>
          <${Copy} text=${letter.id} label="Copy the id" />
        <span class="grow"></span>
        ${letter.at && html`<span class="hint"><${Ago} time=${letter.at} /></span>`}
        ${
          mayOperate() &&
          html`
          <${Button} kind="primary" icon="redo" disabled=${!job} action=${again}>Redrive<//>
          <${Button} icon="trash" label="Purge ${letter.id}" action=${remove} />
        `
        }
      </header>
      <div class="letter-body">
        ${job && html`<p class="strong cut" title=${job.prompt}>${job.prompt || words(job.task)}</p>`}
        <p>${letter.detail}</p>
        ${job
          ? html`
              <p class="hint"><${Coded} text=${job.error ? remedy(job.error) : CAUSE} /></p>
              <p class="hint">tenant ${letter.tenant} · ${job.model} · ${sizeText(job)} · ${plural(job.attempts, "attempt")}</p>
            `
          : html`<p class="hint">Its entry in the queue could not be read: it can only be purged.</p>`}
      </div>
    </article>
  `;
}
