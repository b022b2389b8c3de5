// The action log: what operators did, to what, and with which key.

import { html } from "../vendor/htm-preact-3.1.1.js";
import { call, withQuery } from "../core/api.js";
import { count, dateTime, jobHref, words } from "../core/format.js";
import { go, useLoaded } from "../core/hooks.js";
import { Ago, Button, Empty, ErrorNote, Panel, Skeleton } from "../parts/ui.js";

const PAGE = 50;

export function Actions({ params }) {
  const after = params.get("after") ?? "";
  const { data, error, loading, reload } = useLoaded(
    (signal) => call(withQuery("v1/actions", { limit: PAGE, after }), { signal }),
    [after],
    after ? 0 : 5_000,
  );
  const actions = data?.data ?? [];
  return html`
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${6} />`}
    ${
      data &&
      !actions.length &&
      html`<${Panel} title="No actions"><${Empty} icon="actions" title="No operator has changed anything.">
        Pauses, redrives and other actions that need the scope admin are listed here for 90 days.<//><//>`
    }
    ${actions.length > 0 && html`<${Table} actions=${actions} />`}
    <nav class="pager" aria-label="Pages">
      ${after && html`<${Button} icon="left" action=${() => go("#/actions")}>Newest<//>`}
      ${data?.has_more && html`<${Button} action=${() => go(`#/actions?after=${encodeURIComponent(data.next_cursor)}`)}>Older<//>`}
    </nav>
  `;
}

const Table = ({ actions }) => html`
  <div class="panel scroll" tabindex="0" role="region" aria-label="Actions">
    <table class="actions-log">
      <thead><tr><th scope="col">When</th><th scope="col">Action</th><th scope="col">Target</th>
        <th scope="col" class="number">Changed</th><th scope="col">Detail</th><th scope="col">Key</th></tr></thead>
      <tbody>
        ${actions.map(
          (action) => html`
            <tr key=${action.id}>
              <td class="nowrap" title=${dateTime(action.at)}><${Ago} time=${action.at} /></td>
              <td class="strong nowrap">${words(action.action)}</td>
              <td><${Target} ...${action} /></td>
              <td class="number">${count(action.count)}</td>
              <td>${action.detail}</td>
              <td class="mono">${action.key_id ?? html`<span class="hint">none</span>`}</td>
            </tr>
          `,
        )}
      </tbody>
    </table>
  </div>
`;

/** What an action was taken on; the detail of one on a job begins with the job's tenant. */
function Target({ target, detail }) {
  if (!/^job_\w+$/.test(target)) return html`<span>${target}</span>`;
  const tenant = detail.match(/^tenant ([a-z0-9_-]+)/)?.[1];
  return html`<a class="mono" href=${jobHref({ id: target, tenant })}>${target}</a>`;
}
