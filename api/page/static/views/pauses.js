// Pauses: a banner above every view while something is paused, and the dialog that pauses.

import { html, useEffect, useState } from "../vendor/htm-preact-3.1.1.js";
import { call } from "../core/api.js";
import { useLoaded, useStore } from "../core/hooks.js";
import { overview } from "../core/overview.js";
import { pause, pausedText, pauseOf, resume } from "../core/pauses.js";
import { mayOperate } from "../core/session.js";
import { confirm, Dialog } from "../parts/dialogs.js";
import { Select, Text } from "../parts/fields.js";
import { Icon } from "../parts/icons.js";
import { Ago, Button, toast } from "../parts/ui.js";

const MOST_SHOWN = 4; // of the banner
const MOST_REASON_CHARS = 200;
const KINDS = [
  ["all", "everything"],
  ["model", "a model"],
  ["tenant", "a tenant"],
];

/** What is paused, on every view of those who can end it. */
export function PauseBanner() {
  const { pauses } = useStore(overview);
  if (!mayOperate() || !pauses?.length) return null;
  return html`
    <section class="note is-paused pauses" aria-label="Pauses">
      <${Icon} name="pause" />
      <ul class="grow">
        ${pauses.slice(0, MOST_SHOWN).map(
          (one) => html`
            <li key=${pausedText(one)}>
              <p class="grow"><span class="strong">Paused: ${pausedText(one)}</span>${one.reason && ` · ${one.reason}`} ·${" "}
                <${Ago} time=${one.paused_at} />${one.key_id ? ` by key ${one.key_id}` : ""}</p>
              <${Button} action=${() => askToResume(one)} label="Resume ${pausedText(one)}">Resume<//>
            </li>
          `,
        )}
        ${pauses.length > MOST_SHOWN && html`<li>and ${pauses.length - MOST_SHOWN} more: <code>fusequeue pauses</code></li>`}
      </ul>
    </section>
  `;
}

async function askToResume({ kind, name }) {
  const text = pausedText({ kind, name });
  const run = async () => (await resume(kind, name), true);
  const done = await confirm({
    title: `Resume ${text}?`,
    text: "Its queued jobs start as soon as workers have room. Other pauses stay.",
    verb: "Resume",
    run,
  });
  if (done) toast(`Resumed ${text}`);
}

/** Pauses or resumes one model, tenant or everything; without `kind` the dialog asks what to pause. */
export function PauseButton({ kind, name = "" }) {
  const { pauses } = useStore(overview);
  const [asking, setAsking] = useState(false);
  if (!mayOperate()) return null;
  const paused = kind && pauseOf(pauses, kind, name);
  if (paused) return html`<${Button} icon="resume" action=${() => askToResume(paused)}>Resume<//>`;
  return html`
    <${Button} icon="pause" action=${() => setAsking(true)}>${kind ? "Pause" : "Pause work"}<//>
    ${asking && html`<${PauseDialog} fixed=${kind && { kind, name }} onClose=${() => setAsking(false)} />`}
  `;
}

function PauseDialog({ fixed, onClose }) {
  const [chosen, setChosen] = useState(fixed ?? { kind: "all", name: "" });
  const [reason, setReason] = useState("");
  const [fault, setFault] = useState(null);
  const { kind, name } = chosen;
  const submit = async () => {
    await pause(kind, name.trim(), reason.trim());
    toast(`Paused ${pausedText({ kind, name: name.trim() })}`);
    onClose();
  };
  const pressed = (event) => {
    event.preventDefault();
    event.target.querySelector("footer .danger").click();
  };
  return html`
    <${Dialog} title="Pause ${fixed ? pausedText(fixed) : "work"}?" onClose=${onClose} kind="narrow">
      <form onSubmit=${pressed}>
        <p>Queued jobs do not start until it is resumed. Running jobs run on; new ones are accepted and wait.</p>
        ${!fixed && html`<${What} chosen=${chosen} setChosen=${setChosen} />`}
        <${Text} label="Reason, for other operators" name="reason" value=${reason} onChange=${setReason} maxlength=${MOST_REASON_CHARS} placeholder="a new driver" autofocus=${Boolean(fixed)} />
        ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
        <footer>
          <${Button} action=${onClose}>Keep running<//>
          <${Button} kind="danger" type="submit" action=${submit} onError=${setFault} disabled=${kind !== "all" && !name.trim()}>
            Pause ${kind === "all" ? "everything" : name}<//>
        </footer>
      </form>
    <//>
  `;
}

/** What to pause: everything, a model, chosen where the key may list them, or a tenant by its name. */
function What({ chosen, setChosen }) {
  const { data } = useLoaded((signal) => call("v1/models", { signal }), []);
  const models = (data?.data ?? []).map(({ id }) => [id, id]);
  const first = models[0]?.[0] ?? "";
  const setKind = (kind) => setChosen({ kind, name: kind === "model" ? first : "" });
  useEffect(() => {
    if (chosen.kind === "model" && !chosen.name && first) setKind("model"); // chosen before the models were loaded
  }, [first]);
  const name = { name: chosen.kind, value: chosen.name, onChange: (value) => setChosen({ ...chosen, name: value }) };
  return html`
    <${Select} label="What" name="kind" value=${chosen.kind} options=${KINDS} onChange=${setKind} />
    ${chosen.kind === "model" && (models.length ? html`<${Select} label="Model" ...${name} options=${models} />` : html`<${Text} label="Model" ...${name} />`)}
    ${chosen.kind === "tenant" && html`<${Text} label="Tenant" ...${name} spellcheck=${false} />`}
  `;
}
