// Tenants: what each has used of the devices, and its limits with what it uses of them.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { call, withQuery } from "../core/api.js";
import { bytes, count, duration, plural } from "../core/format.js";
import { go, useLoaded } from "../core/hooks.js";
import { Button, Empty, ErrorNote, Panel, Segments, Skeleton } from "../parts/ui.js";
import { Typed } from "./filters.js";
import { TenantLimits } from "./tenant_limits.js";

const PAGE = 50;
const PERIODS = [
  ["1", "Today"],
  ["7", "7 days"],
  ["30", "30 days"],
];
const LIMITS = [
  ["queued_jobs", "Queued", count],
  ["running_slots", "Running", count],
  ["device_seconds_per_day", "Time today", seconds],
  ["device_seconds_per_month", "This month", seconds],
  ["kept_jobs", "Kept jobs", count],
  ["stored_bytes", "Stored", bytes],
];

function seconds(number) {
  return number ? duration(1_000 * number) : "–";
}

export function Tenants({ params }) {
  const known = { days: periodOf(params.get("days")), name: params.get("name") ?? "", after: params.get("after") ?? "" };
  const opened = params.get("tenant") ?? "";
  const [limited, setLimited] = useState(null);
  const query = withQuery("v1/tenants", { ...known, limit: PAGE });
  const { data, error, loading, reload } = useLoaded((signal) => call(query, { signal }), [query], 10_000);
  const change = (changes) => {
    const next = { ...known, after: "", tenant: opened, ...changes };
    go(withQuery("#/tenants", { ...next, days: next.days === "1" ? "" : next.days }), { replace: true });
  };
  const tenants = data?.data ?? [];
  return html`
    <div class="toolbar">
      <form class="filters grow" role="search" aria-label="Filter the tenants" onSubmit=${(event) => event.preventDefault()}>
        <${Typed} label="Tenant" name="name" placeholder="begins with" filters=${known} change=${change} />
      </form>
      <${Segments} label="Usage of" value=${known.days} options=${PERIODS} onChange=${(days) => change({ days })} />
    </div>
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${6} />`}
    ${
      data &&
      !tenants.length &&
      html`<${Panel} title="No tenants"><${Empty} icon="tenants" title=${known.name ? "No tenant begins so." : "There is no tenant yet."}>
        Tenants that have keys, limits or jobs are listed here.<//><//>`
    }
    ${limited && html`<${TenantLimits} tenant=${limited} onClose=${() => (setLimited(null), reload())} />`}
    ${tenants.length > 0 && html`<${Table} page=${data} opened=${opened} limit=${setLimited} open=${(tenant) => change({ tenant, after: known.after })} />`}
    <nav class="pager" aria-label="Pages">
      ${known.after && html`<${Button} icon="left" action=${() => change({})}>First<//>`}
      ${data?.has_more && html`<${Button} action=${() => change({ after: data.next_cursor })}>Next<//>`}
    </nav>
  `;
}

const periodOf = (days) => (PERIODS.some(([value]) => value === days) ? days : "1");

const Table = ({ page, opened, open, limit }) => html`
  <div class="panel scroll" tabindex="0" role="region" aria-label="Usage and limits of tenants">
    <table class="tenants-use">
      <thead><tr><th scope="col">Tenant</th><${UsageHeads} />
        ${LIMITS.map(([name, head]) => html`<th key=${name} scope="col" class="number">${head}</th>`)}</tr></thead>
      <tbody>
        ${page.data.map(
          (tenant) => html`
            <tr key=${tenant.id}>
              <th scope="row"><${Button} kind="quiet" aria-expanded=${opened === tenant.id}
                label="Models of ${tenant.id}" action=${() => open(opened === tenant.id ? "" : tenant.id)}>${tenant.id}<//>
                <p class="of-tenant"><a href="#/jobs?tenant=${tenant.id}" aria-label="Jobs of ${tenant.id}">jobs</a>
                  <a href="#/keys?tenant=${tenant.id}" aria-label="Keys of ${tenant.id}">keys</a>
                  <${Button} kind="quiet" label="Limits of ${tenant.id}" action=${() => limit(tenant)}>limits<//></p></th>
              <${UsageCells} row=${tenant.usage} />
              ${LIMITS.map(([name, , text]) => html`<td key=${name} class="number nowrap"><${Use} tenant=${tenant} name=${name} text=${text} /></td>`)}
            </tr>
            ${opened === tenant.id && html`<${ModelRows} key="models of ${tenant.id}" tenant=${tenant.id} from=${page.first_day} to=${page.last_day} />`}
          `,
        )}
      </tbody>
    </table>
    <p class="hint pad">Usage from ${page.first_day} to ${page.last_day} (UTC).</p>
  </div>
`;

const UsageHeads = () => html`
  <th scope="col" class="number">Device time</th><th scope="col" class="number">Images</th>
  <th scope="col" class="number">Steps</th><th scope="col" class="number">Output</th><th scope="col" class="number">Ended jobs</th>
`;

function UsageCells({ row }) {
  const { succeeded, ...others } = row.jobs;
  const unsuccessful = Object.entries(others).filter(([, jobs]) => jobs > 0);
  return html`
    <td class="number nowrap strong">${row.device_seconds ? duration(1_000 * row.device_seconds) : "–"}</td>
    <td class="number">${count(row.images)}${row.videos > 0 && html`<br /><span class="hint nowrap">and ${plural(row.videos, "video")}</span>`}</td>
    <td class="number">${count(row.steps)}${row.skipped_steps > 0 && html`<br /><span class="hint nowrap">${count(row.skipped_steps)} skipped</span>`}</td>
    <td class="number nowrap">${bytes(row.output_bytes)}</td>
    <td class="number">${count(succeeded)}${unsuccessful.map(([end, jobs]) => html`<br /><span class="hint nowrap">${count(jobs)} ${end}</span>`)}</td>
  `;
}

/** What a tenant uses of a limit; its own limits are strong, those of the settings are not. */
function Use({ tenant, name, text }) {
  const limit = tenant.limits[name];
  const own = tenant.own_limits.includes(name);
  const title = limit === null ? "unlimited" : own ? "its own limit" : "the limit of the settings";
  return html`${text(tenant.use[name])}${limit !== null && html` <span class=${own ? "strong" : "hint"} title=${title}>of ${text(limit)}</span>`}`;
}

/** The usage of a tenant by model, below its row. */
function ModelRows({ tenant, from, to }) {
  const query = withQuery("v1/usage", { tenant, from, to, group_by: "model", limit: 100 });
  const { data, error } = useLoaded((signal) => call(query, { signal }), [query], 10_000);
  const rows = data?.data ?? [];
  if (!rows.length) {
    return html`<tr class="of-model"><td colspan=${6 + LIMITS.length} class="hint">${error ? error.message : data ? "No usage in these days." : "…"}</td></tr>`;
  }
  return rows.map(
    (row) => html`<tr key=${row.model} class="of-model"><td class="mono">${row.model}</td><${UsageCells} row=${row} />
      <td colspan=${LIMITS.length}></td></tr>`,
  );
}
