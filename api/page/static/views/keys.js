// API keys of all tenants, without their secrets: who has which, when it was used, and its end.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { call, ownKeyId, withQuery } from "../core/api.js";
import { dateTime } from "../core/format.js";
import { go, useLoaded } from "../core/hooks.js";
import { mayCreateKeys } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Ago, Badge, Button, Empty, ErrorNote, Panel, Skeleton, toast } from "../parts/ui.js";
import { OfTenant } from "./filters.js";
import { NewKey } from "./new_key.js";

const PAGE = 50;
const STATES = { active: "succeeded", expired: "expired", revoked: "failed" };

export function Keys({ params }) {
  const filters = { tenant: params.get("tenant") ?? "" };
  const after = params.get("after") ?? "";
  const query = withQuery("v1/keys", { ...filters, limit: PAGE, after });
  const { data, error, loading, reload } = useLoaded((signal) => call(query, { signal }), [query], 10_000);
  const change = (changes) => go(withQuery("#/keys", { ...filters, ...changes }), { replace: true });
  const [isAsking, setAsking] = useState(false);
  const keys = data?.data ?? [];
  return html`
    <div class="toolbar">
      <form class="filters grow" role="search" aria-label="Filter the keys" onSubmit=${(event) => event.preventDefault()}>
        <${OfTenant} placeholder="any" filters=${filters} change=${change} />
      </form>
      ${mayCreateKeys() ? html`<${Button} kind="primary" icon="key" action=${() => setAsking(true)}>Create a key<//>` : html`<p class="hint"><code>fusequeue keys create</code> creates a key.</p>`}
    </div>
    ${isAsking && html`<${NewKey} tenant=${filters.tenant} onClose=${() => (setAsking(false), reload())} />`}
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${6} />`}
    ${
      data &&
      !keys.length &&
      html`<${Panel} title="No keys"><${Empty} icon="key" title=${filters.tenant ? "This tenant has no key." : "There is no key yet."}>
        Once there is one, every request needs a key.<//><//>`
    }
    ${keys.length > 0 && html`<${Table} keys=${keys} reload=${reload} />`}
    <nav class="pager" aria-label="Pages">
      ${after && html`<${Button} icon="left" action=${() => change({})}>Newest<//>`}
      ${data?.has_more && html`<${Button} action=${() => change({ after: data.next_cursor })}>Older<//>`}
    </nav>
  `;
}

const Table = ({ keys, reload }) => html`
  <div class="panel scroll" tabindex="0" role="region" aria-label="Keys">
    <table class="keys-table">
      <thead><tr><th scope="col">Key</th><th scope="col">State</th><th scope="col">Tenant</th><th scope="col">Scopes</th>
        <th scope="col">Name</th><th scope="col">Used</th><th scope="col">Created</th><th scope="col">Expires</th>
        <th scope="col"><span class="unseen">Change</span></th></tr></thead>
      <tbody>
        ${keys.map(
          (key) => html`
            <tr key=${key.id}>
              <th scope="row" class="mono nowrap">${key.prefix}…</th>
              <td class="nowrap"><${Badge} state=${STATES[key.state]}>${key.state}<//>
                ${key.id === ownKeyId() && html`<br /><span class="hint">of this page</span>`}</td>
              <td class="owner"><a href="#/tenants?name=${key.tenant}">${key.tenant}</a></td>
              <td>${key.scopes.map((scope) => html`<code key=${scope}>${scope}</code>`)}</td>
              <td class="note-text">${key.name}</td>
              <td class="nowrap">${key.last_used_at ? html`<${Ago} time=${key.last_used_at} />` : html`<span class="hint">never</span>`}</td>
              <td class="nowrap"><${Ago} time=${key.created_at} /></td>
              <td class="nowrap">${key.expires_at ? dateTime(key.expires_at) : html`<span class="hint">never</span>`}</td>
              <td>${key.state === "active" && html`<${Button} icon="trash" label="Revoke ${key.prefix}" action=${() => revoke(key, reload)} />`}</td>
            </tr>
          `,
        )}
      </tbody>
    </table>
    <p class="hint pad">Revoked and expired keys are listed for 30 days.</p>
  </div>
`;

async function revoke(key, reload) {
  const run = async () => (await call(`v1/keys/${key.id}`, { method: "DELETE" }), true);
  const own = key.id === ownKeyId() ? " This page uses it, and asks for another one then." : "";
  const done = await confirm({
    title: `Revoke ${key.prefix}…?`,
    text: `Within two seconds each request with this key of ${key.tenant} is refused. It cannot be restored.${own}`,
    verb: "Revoke",
    danger: true,
    run,
  });
  if (done) toast(`Revoked ${key.prefix}…`);
  reload();
}
