// The filters of the list of jobs; they are part of the address.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { call } from "../core/api.js";
import { STATES } from "../core/format.js";
import { useLoaded } from "../core/hooks.js";
import { mayOperate, session } from "../core/session.js";
import { Icon } from "../parts/icons.js";
import { Button } from "../parts/ui.js";

export const FILTERS = ["status", "prompt", "model", "batch_id", "group", "parent", "metadata", "after_time", "before_time", "tenant"];

const SHOWN = ["status", "prompt"]; // also on a phone, where the others are behind a button

export function Filters({ filters, change }) {
  const { data } = useLoaded((signal) => call("v1/models", { signal }), []);
  const chosen = new Set(filters.status.split(",").filter(Boolean));
  const toggle = (state) => {
    const next = new Set(chosen);
    if (!next.delete(state)) next.add(state);
    change({ status: STATES.filter((one) => next.has(one)).join(",") });
  };
  const any = FILTERS.some((name) => filters[name]);
  const [isOpen, setOpen] = useState(FILTERS.some((name) => filters[name] && !SHOWN.includes(name)));
  return html`
    <form class="filters ${isOpen ? "" : "is-short"}" role="search" aria-label="Filter the jobs" onSubmit=${(event) => event.preventDefault()}>
      <fieldset class="states">
        <legend class="unseen">State</legend>
        ${STATES.map(
          (state) => html`
            <label key=${state} class="chip is-${state}">
              <input type="checkbox" checked=${chosen.has(state)} onChange=${() => toggle(state)} /><i></i>${state}
              </label>
          `,
        )}
      </fieldset>
      <${Typed} label="Prompt" name="prompt" placeholder="any part of it" maxlength="200" filters=${filters} change=${change} />
      <button type="button" class="button more-filters" aria-expanded=${isOpen} aria-label="${isOpen ? "Fewer" : "More"} filters" onClick=${() => setOpen(!isOpen)}><${Icon} name="filter" size=${16} />
        <span>${isOpen ? "Fewer" : "More"}</span></button>
      <label><span>Model</span>
        <select value=${filters.model} onChange=${(event) => change({ model: event.target.value })}>
          <option value="">any</option>
          ${(data?.data ?? []).map((model) => html`<option key=${model.id} value=${model.id}>${model.id}</option>`)}
        </select>
      </label>
      <${Typed} label="Metadata" name="metadata" placeholder="key=value" filters=${filters} change=${change} />
      <${Typed} label="Batch" name="batch_id" placeholder="any" filters=${filters} change=${change} />
      <${Typed} label="Group" name="group" placeholder="any" filters=${filters} change=${change} />
      <${Typed} label="Parent" name="parent" placeholder="any" maxlength="30" filters=${filters} change=${change} />
      ${mayOperate() && html`<${OfTenant} filters=${filters} change=${change} />`}
      <${Typed} label="From" name="after_time" type="datetime-local" filters=${filters} change=${change} />
      <${Typed} label="To" name="before_time" type="datetime-local" filters=${filters} change=${change} />
      ${any && html`<${Button} kind="quiet" icon="close" action=${() => change(Object.fromEntries(FILTERS.map((name) => [name, ""])))}>Clear<//>`}
    </form>
  `;
}

/** A field for a tenant, of which the first are offered; empty are an operator's own jobs. */
export function OfTenant({ filters, change, placeholder = session.value.tenant }) {
  const { data } = useLoaded((signal) => call("v1/tenants?limit=100", { signal }), []);
  return html`
    <${Typed} label="Tenant" name="tenant" placeholder=${placeholder} list="tenants" maxlength="63" filters=${filters} change=${change} />
    <datalist id="tenants">${(data?.data ?? []).map(({ id }) => html`<option key=${id} value=${id}></option>`)}</datalist>
  `;
}

/** A field that filters when it is left, or with Enter. */
export function Typed({ label, name, filters, change, ...rest }) {
  const [typed, setTyped] = useState(null);
  const commit = () => {
    if (typed !== null && typed !== filters[name]) change({ [name]: typed });
    setTyped(null);
  };
  return html`
    <label><span>${label}</span>
      <input spellcheck=${false} autocomplete="off" value=${typed ?? filters[name]} onInput=${(event) => setTyped(event.target.value)}
        onBlur=${commit} onKeyDown=${(event) => event.key === "Enter" && commit()} ...${rest} />
    </label>
  `;
}
