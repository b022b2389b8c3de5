// Fields of a form, each with its label and what is wrong with it.

import { html } from "../vendor/htm-preact-3.1.1.js";

/** A label above a control that is given as the child. */
export const Field = ({ label, fault, note, noteFault, children }) => html`
  <label class="field ${fault ? "is-faulty" : ""}">
    <span>${label}${note && html`<small class=${noteFault ? "fault" : ""}>${note}</small>`}</span>
    ${children}
    ${fault && html`<em class="fault" role="alert">${fault}</em>`}
  </label>
`;

export const Text = ({ label, value, onChange, fault, note, ...rest }) => html`
  <${Field} label=${label} fault=${fault} note=${note}>
    <input autocomplete="off" value=${value} onInput=${(event) => onChange(event.target.value)} aria-invalid=${Boolean(fault)} ...${rest} />
  <//>
`;

export const Select = ({ label, name, value, options, onChange, fault, disabled = false }) => html`
  <${Field} label=${label} fault=${fault}>
    <select name=${name} value=${value} disabled=${disabled} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([option, text]) => html`<option key=${text} value=${option} selected=${option === value}>${text}
        </option>`)}
    </select>
  <//>
`;

export const Check = ({ label, name, value, onChange }) => html`
  <label class="check">
    <input type="checkbox" name=${name} checked=${value} onChange=${(event) => onChange(event.target.checked)} /> ${label}</label>
`;

/** A number with a slider and a field; the field also takes what the slider's steps leave out. With `unset`, an empty
 * field means that, which is the slider's end. */
export function Range({ label, name, value, min, max, step, onChange, fault, unset = "" }) {
  const read = ({ target }) => (target.value !== "" || (unset && !target.validity.badInput)) && onChange(target.value && Number(target.value));
  const left = ({ target }) => {
    if (target.value === "") target.value = value; // a field that is left empty shows what is sent
  };
  return html`
    <div class="field range ${fault ? "is-faulty" : ""}" role="group" aria-label=${label}>
      <span aria-hidden="true">${label}</span>
      <div class="joined">
        <input type="range" tabindex="-1" aria-label="${label}, slider" min=${min} max=${max} step=${step} value=${value === "" ? max : value} onInput=${read} />
        <input type="number" name=${name} aria-label=${label} min=${min} max=${max} step=${step} value=${value} placeholder=${unset} onInput=${read} onBlur=${left} aria-invalid=${Boolean(fault)} />
      </div>
      ${fault && html`<em class="fault" role="alert">${fault}</em>`}
    </div>
  `;
}
