// The limits of one tenant in a dialog, with what it uses of each.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { call } from "../core/api.js";
import { bytes, count, duration } from "../core/format.js";
import { Dialog } from "../parts/dialogs.js";
import { Text } from "../parts/fields.js";
import { Button, toast } from "../parts/ui.js";

const seconds = (value) => duration(1_000 * value);
const LIMITS = [
  ["requests_per_minute", "Requests a minute", count],
  ["queued_jobs", "Queued jobs", count],
  ["running_slots", "Running slots", count],
  ["device_seconds_per_day", "Device seconds a day", seconds],
  ["device_seconds_per_month", "Device seconds a month", seconds],
  ["kept_jobs", "Kept jobs", count],
  ["record_bytes", "Bytes of records", bytes],
  ["stored_objects", "Stored objects", count],
  ["stored_bytes", "Stored bytes", bytes],
];

/** Shows and changes the limits of a tenant of `GET /v1/tenants`; an empty field is the limit of the settings. */
export function TenantLimits({ tenant, onClose }) {
  const own = (name) => (tenant.own_limits.includes(name) ? String(tenant.limits[name]) : "");
  const [values, setValues] = useState(() => Object.fromEntries(LIMITS.map(([name]) => [name, own(name)])));
  const [error, setError] = useState(null);
  const changes = Object.fromEntries(
    LIMITS.filter(([name]) => values[name].trim() !== own(name)).map(([name]) => [name, limitOf(values[name].trim())]),
  );
  const faultOf = (name) =>
    error?.faults.find((fault) => fault.param === name)?.message ?? (error?.param === name ? error.message : null);
  const save = async () => {
    await call(`v1/tenants/${tenant.id}/limits`, { method: "PATCH", json: changes });
    toast(`Changed the limits of ${tenant.id}`);
    onClose();
  };
  const pressed = (event) => {
    event.preventDefault();
    event.target.querySelector("footer .primary").click();
  };
  return html`
    <${Dialog} title="Limits of ${tenant.id}" onClose=${onClose}>
      <form onSubmit=${pressed}>
        <p>They count for the next request and the next job that starts. An empty field is the limit of the settings.</p>
        <div class="form-grid">
          ${LIMITS.map(
            ([name, label, text]) => html`
              <${Text} key=${name} label=${label} name=${name} value=${values[name]} inputmode="numeric" fault=${faultOf(name)}
                placeholder=${settingText(tenant, name)} note=${useText(tenant, name, text)}
                onChange=${(value) => (setError(null), setValues((before) => ({ ...before, [name]: value })))} />
            `,
          )}
        </div>
        ${error && !LIMITS.some(([name]) => faultOf(name)) && html`<p class="fault" role="alert">${error.message}</p>`}
        <footer>
          <${Button} action=${onClose}>Cancel<//>
          <${Button} kind="primary" type="submit" action=${save} onError=${setError} disabled=${!Object.keys(changes).length}>Change<//>
        </footer>
      </form>
    <//>
  `;
}

/** What the tenant uses, and of how much where the field has bytes. */
function useText({ use, limits }, name, text) {
  if (!(name in use)) return "";
  const isInBytes = text === bytes && limits[name] !== null;
  return `uses ${text(use[name])}${isInBytes ? ` of ${bytes(limits[name])}` : ""}`;
}

/** What an empty field means, as far as it is known: the limit of the settings is not while the tenant has its own. */
function settingText({ own_limits, limits }, name) {
  if (own_limits.includes(name)) return "that of the settings";
  return limits[name] === null ? "unlimited" : String(limits[name]);
}

/** The limit of a text; the service refuses one that is no number. */
function limitOf(text) {
  if (text === "") return null;
  return /^\d+$/.test(text) ? Number(text) : text;
}
