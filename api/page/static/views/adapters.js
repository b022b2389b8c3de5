// The adapters of a request: those of the model, and those that the tenant has uploaded for it.

import { html, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { call } from "../core/api.js";
import { useLoaded } from "../core/hooks.js";
import { announce, mayWrite } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Check, Range } from "../parts/fields.js";
import { Button, toast } from "../parts/ui.js";

const MOST = 100; // uploaded ones that are offered, the newest

/** Choose adapters with their scales, upload others and delete them. */
export function Adapters({ model, values, set, fault }) {
  const { data, reload } = useLoaded((signal) => call(`v1/adapters?limit=${MOST}`, { signal }), []);
  const [warnings, setWarnings] = useState([]);
  const uploaded = (data?.data ?? []).filter((adapter) => adapter.model === model.id);
  const known = [...model.adapters, ...uploaded];
  const others = Object.keys(values.adapters).filter((id) => !known.some((one) => one.id === id));
  const change = (id, scale) =>
    set(({ adapters: { [id]: _, ...rest } }) => ({ adapters: scale === null ? rest : { ...rest, [id]: scale } }));
  const added = (adapter) => {
    reload();
    setWarnings(adapter.warnings);
    change(adapter.id, adapter.scale);
  };
  const remove = async (adapter) => {
    const run = async () => (await call(`v1/adapters/${adapter.id}`, { method: "DELETE" }), true);
    const text = "Its file is deleted for good. Jobs that used it keep their results.";
    if (await confirm({ title: `Delete ${adapter.name}?`, text, verb: "Delete", danger: true, run })) {
      change(adapter.id, null);
      toast(`Deleted ${adapter.name}`);
    }
    reload();
  };
  return html`
    <fieldset class="group"><legend>Adapters</legend>
      ${[...known, ...others.map((id) => ({ id, token: null, scale: 1, max_scale: 10 }))].map(
        (adapter) =>
          html`<${Adapter} key=${adapter.id} adapter=${adapter} scale=${values.adapters[adapter.id]} change=${change} remove=${uploaded.includes(adapter) && mayWrite() && remove} />`,
      )}
      ${warnings.map((warning) => html`<p class="hint" role="status">${warning}</p>`)}
      ${mayWrite() && html`<${Upload} model=${model} added=${added} />`}
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}
    </fieldset>
  `;
}

function Adapter({ adapter, scale, change, remove }) {
  const { id, token, max_scale } = adapter;
  const isUsed = scale !== undefined;
  const name = adapter.name ?? id;
  return html`
    <div class="group-row">
      <span class="adapter" title=${id}>
        <${Check} label=${token === null ? name : `${name}: ${token} in a prompt`} name="adapters" value=${isUsed} onChange=${(on) => change(id, on ? adapter.scale : null)} />
        ${remove && html`<${Button} kind="quiet" icon="trash" label="Delete ${name}" action=${() => remove(adapter)} />`}
      </span>
      ${isUsed && token === null && html`<${Range} label="Scale of ${name}" name="adapters" value=${scale} min=${-max_scale} max=${max_scale} step=${0.05} onChange=${(value) => change(id, value)} />`}
    </div>
  `;
}

/** Uploads a file for the model; what the service refuses in it is shown here. */
function Upload({ model, added }) {
  const [isBusy, setBusy] = useState(false);
  const [refused, setRefused] = useState(null);
  const input = useRef(null);
  const chosen = async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    const body = new FormData();
    body.append("model", model.id);
    body.append("file", file, file.name);
    target.value = ""; // so that the same file can be chosen again
    setRefused(null);
    setBusy(true);
    try {
      const adapter = await call("v1/adapters", { method: "POST", body });
      announce(`Uploaded ${adapter.name}`);
      added(adapter);
    } catch (error) {
      setRefused(error.message);
    }
    setBusy(false);
  };
  return html`
    <div class="actions">
      <${Button} icon="upload" disabled=${isBusy} action=${() => input.current.click()}>${isBusy ? "Uploading …" : "Upload a LoRA or an embedding"}<//>
      <input ref=${input} class="unseen" tabindex="-1" type="file" aria-label="Adapter" accept=".safetensors" onChange=${chosen} />
      ${refused && html`<em class="fault" role="alert">${refused}</em>`}
    </div>
  `;
}
