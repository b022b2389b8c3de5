// Dead letters: jobs that failed permanently, why, and what to do about them.

import { html, useEffect, useState } from "../vendor/htm-preact-3.1.1.js";
import { call, withQuery } from "../core/api.js";
import { each } from "../core/actions.js";
import { plural, remedy, words } from "../core/format.js";
import { go, useLoaded } from "../core/hooks.js";
import { mayOperate } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Ago, Badge, Button, Copy, Empty, ErrorNote, Panel, Skeleton, toast, toastError } from "../parts/ui.js";

const PAGE = 50;
const CAUSE = "The workers' logs have its id and the reason.";

export function DeadLetters({ params }) {
  const after = params.get("after") ?? "";
  const { data, error, loading, reload } = useLoaded(
    (signal) => call(withQuery("v1/dead-letters", { limit: PAGE, after }), { signal }),
    [after],
    5_000,
  );
  const [selected, setSelected] = useState(new Set());
  useEffect(() => setSelected(new Set()), [after]);
  const letters = data?.data ?? [];
  const chosen = letters.filter((letter) => selected.has(letter.id));
  const toggle = (id) =>
    setSelected((before) =>
      before.has(id) ? new Set([...before].filter((one) => one !== id)) : new Set([...before, id]),
    );
  const all = letters.length > 0 && letters.every((letter) => selected.has(letter.id));
  const props = { reload, setSelected };
  return html`
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${4} />`}
    ${data && !letters.length && html`<${Panel} title="No dead letters">
      <${Empty} icon="check" title="No job has failed permanently.">A job comes here after it took several workers with it.<//><//>`}
    ${
      letters.length > 0 &&
      html`
      <div class="toolbar">
        ${mayOperate() && html`<label class="check">
          <input type="checkbox" checked=${all} onChange=${() => setSelected(all ? new Set() : new Set(letters.map((letter) => letter.id)))} /> Select all on this page</label>`}
        <p class="grow hint" role="status">
          ${plural(letters.length, "dead letter")}${data.has_more ? ", more on the next page" : ""}</p>
        ${mayOperate() && chosen.length > 0 && html`<${Many} chosen=${chosen} ...${props} />`}
      </div>
      <div class="stack">${letters.map((letter) => html`<${Letter} key=${letter.id} letter=${letter} selected=${selected.has(letter.id)} toggle=${toggle} ...${props} />`)}</div>
    `
    }
    <nav class="pager" aria-label="Pages">
      ${after && html`<${Button} icon="left" action=${() => go("#/dead-letters")}>Newest<//>`}
      ${data?.has_more && html`<${Button} action=${() => go(`#/dead-letters?after=${encodeURIComponent(data.next_cursor)}`)}>Older<//>`}
    </nav>
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
  const ask =
    (verb, past, action, text, ids, danger = false) =>
    async () => {
      const run = (progress) => each(ids, action, progress);
      const outcome = await confirm({
        title: `${verb} the selected dead letters?`,
        text,
        verb,
        danger,
        noun: "dead letter",
        count: () => ({ total: ids.length }),
        run,
      });
      if (outcome) finish(outcome, past);
    };
  const drivable = chosen.filter((letter) => letter.job).map((letter) => letter.id);
  return html`
    <div class="actions">
      <span class="hint">${chosen.length} selected</span>
      <${Button} icon="redo" disabled=${!drivable.length} action=${ask("Redrive", "Redrove", redrive, "The jobs are queued again with their attempts reset.", drivable)}>Redrive ${drivable.length}<//>
      <${Button} icon="trash" action=${ask(
        "Purge",
        "Purged",
        purge,
        "The dead letters and the records of their jobs are deleted for good.",
        chosen.map((letter) => letter.id),
        true,
      )}>Purge ${chosen.length}<//>
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
        <h2 class="mono cut"><a href="#/jobs/${letter.id}">${letter.id}</a></h2>
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
        ${job && html`<p class="strong cut" title=${job.prompt}>${job.prompt}</p>`}
        <p>${letter.detail}</p>
        ${job
          ? html`
              <p class="hint">${job.error ? remedy(job.error) : CAUSE}</p>
              <p class="hint">${job.model} · ${job.width} × ${job.height} · ${plural(job.attempts, "attempt")}</p>
            `
          : html`<p class="hint">Its entry in the queue could not be read: it can only be purged.</p>`}
      </div>
    </article>
  `;
}
