// The dialog that creates an API key, and shows it once.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { call } from "../core/api.js";
import { Dialog } from "../parts/dialogs.js";
import { Check, Select, Text } from "../parts/fields.js";
import { Button, Copy } from "../parts/ui.js";

const SCOPES = {
  "jobs:read": "reads jobs, results and models",
  "jobs:write": "submits and changes jobs",
  metrics: "reads the metrics of the service",
};
const DAY_S = 86_400;
const LIVES = [
  ["", "never"],
  [String(DAY_S), "in a day"],
  [String(30 * DAY_S), "in 30 days"],
  [String(90 * DAY_S), "in 90 days"],
  [String(365 * DAY_S), "in a year"],
];

/** Asks for what the key is for, then shows it until that is confirmed: it can be read nowhere afterwards. */
export function NewKey({ tenant, onClose }) {
  const [made, setMade] = useState(null);
  return made ? html`<${Secret} made=${made} onClose=${onClose} />` : html`<${Request} tenant=${tenant} onMade=${setMade} onClose=${onClose} />`;
}

function Request({ tenant, onMade, onClose }) {
  const [values, setValues] = useState({ tenant, name: "", scopes: ["jobs:read", "jobs:write"], expires_s: "" });
  const [error, setError] = useState(null);
  const field = (name) => ({
    name,
    value: values[name],
    fault: error?.faults.find((fault) => fault.param?.split(".")[0] === name)?.message ?? (error?.param === name ? error.message : null),
    onChange: (value) => {
      setError(null);
      setValues((before) => ({ ...before, [name]: value }));
    },
  });
  const { fault, onChange } = field("scopes");
  const toggle = (scope) => (on) => onChange(Object.keys(SCOPES).filter((one) => (one === scope ? on : values.scopes.includes(one))));
  const create = async () => {
    const { expires_s, ...rest } = values;
    const json = { ...rest, tenant: rest.tenant.trim(), ...(expires_s ? { expires_s: Number(expires_s) } : {}) };
    onMade(await call("v1/keys", { method: "POST", json }));
  };
  const pressed = (event) => {
    event.preventDefault();
    event.target.querySelector("footer .primary").click();
  };
  const isNamed = error?.param || error?.faults.length;
  return html`
    <${Dialog} title="Create a key" onClose=${onClose} kind="narrow">
      <form onSubmit=${pressed}>
        <${Text} label="Tenant" ...${field("tenant")} list="tenants" maxlength="63" spellcheck=${false} required autofocus />
        <fieldset class="group"><legend>Scopes</legend>
          ${Object.entries(SCOPES).map(
            ([scope, text]) =>
              html`<${Check} key=${scope} label=${html`<code>${scope}</code> ${text}`} name="scopes" value=${values.scopes.includes(scope)} onChange=${toggle(scope)} />`,
          )}
          ${fault && html`<p class="fault" role="alert">${fault}</p>`}
        </fieldset>
        <${Text} label="Name" ...${field("name")} maxlength="100" placeholder="who or what uses it" />
        <${Select} label="Expires" ...${field("expires_s")} options=${LIVES} />
        ${error && !isNamed && html`<p class="fault" role="alert">${error.message}</p>`}
        <footer>
          <${Button} action=${onClose}>Cancel<//>
          <${Button} kind="primary" type="submit" action=${create} onError=${setError} disabled=${!values.tenant.trim() || !values.scopes.length}>Create<//>
        </footer>
      </form>
    <//>
  `;
}

const Secret = ({ made, onClose }) => html`
  <${Dialog} title="The key of ${made.tenant}" kind="narrow">
    <p>It is shown this once, and stored nowhere. Who has it can use it.</p>
    <p class="secret"><code>${made.key}</code><${Copy} text=${made.key} label="Copy the key">Copy<//></p>
    <footer><${Button} kind="primary" action=${onClose}>I have stored it<//></footer>
  <//>
`;
