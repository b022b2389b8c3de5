// The shell of the page: navigation, the present view, dialogs, and what all views share.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { hasKey, onKeyNeeded, withQuery } from "./core/api.js";
import { count } from "./core/format.js";
import { go, useKeys, useRoute, useStore } from "./core/hooks.js";
import { live, reset } from "./core/live.js";
import { overview, startOverview } from "./core/overview.js";
import { mayOperate, mayRead, openSession, session, tenantOf, useKey } from "./core/session.js";
import { Confirmation, Help, KeyPrompt } from "./parts/dialogs.js";
import { Icon, Mark } from "./parts/icons.js";
import { Lightbox } from "./parts/media.js";
import { Button, Empty, Toasts } from "./parts/ui.js";
import { Actions } from "./views/actions.js";
import { Batches } from "./views/batches.js";
import { Groups } from "./views/groups.js";
import { JobPage } from "./views/job.js";
import { Jobs } from "./views/jobs.js";
import { DeadLetters } from "./views/letters.js";
import { Keys } from "./views/keys.js";
import { Models } from "./views/models.js";
import { Now, nowTitle } from "./views/now.js";
import { PauseBanner } from "./views/pauses.js";
import { forgetRuns, Playground } from "./views/playground.js";
import { Tenants } from "./views/tenants.js";

const VIEWS = [
  { path: "now", name: "Now", icon: "now", view: Now, allowed: () => mayRead() || mayOperate(), title: nowTitle },
  { path: "playground", name: "Playground", icon: "playground", view: Playground, allowed: mayRead },
  { path: "jobs", name: "Jobs", icon: "jobs", view: Jobs, allowed: () => mayRead() || mayOperate() },
  { path: "groups", name: "Groups", icon: "groups", view: Groups, allowed: mayRead },
  { path: "batches", name: "Batches", icon: "batches", view: Batches, allowed: mayRead },
  { path: "dead-letters", name: "Dead letters", icon: "dead", view: DeadLetters, allowed: mayOperate },
  { path: "models", name: "Models", icon: "models", view: Models, allowed: mayRead },
  { path: "tenants", name: "Tenants", icon: "tenants", view: Tenants, allowed: mayOperate },
  { path: "actions", name: "Action log", icon: "actions", view: Actions, allowed: mayOperate },
  { path: "keys", name: "Keys", icon: "key", view: Keys, allowed: mayOperate },
];

function App() {
  const { state, hasKey: keyed, tenant, scopes } = useStore(session);
  const route = useRoute();
  const [dialog, setDialog] = useState(null);
  const identity = [keyed, tenant, ...scopes].join(" ");
  useEffect(() => {
    openSession();
    return onKeyNeeded(
      () =>
        session.value.state === "open" &&
        session.set({ ...session.value, state: "locked", reason: "The key is no longer valid." }),
    );
  }, []);
  useEffect(() => {
    if (state !== "open") return undefined;
    const stop = startOverview();
    return () => {
      stop();
      reset();
    };
  }, [state, identity]);
  useEffect(() => {
    if (state !== "open") setDialog(null); // a mistyped key has its own prompt
  }, [state]);
  useEffect(forgetRuns, [tenant]);
  useEffect(() => {
    if (state !== "down") return undefined;
    const timer = setInterval(openSession, 3_000);
    return () => clearInterval(timer);
  }, [state]);
  const views = VIEWS.filter((view) => view.allowed());
  useShortcuts(views, () => setDialog("help"));
  const view = views.find(({ path }) => path === route.path[0]) ?? (state === "open" ? views[0] : null);
  return html`
    <a class="skip" href="#main" onClick=${skipped}>Skip to the content</a>
    <${Side} views=${views} current=${view} open=${setDialog} />
    <main id="main" tabindex="-1">
      ${state === "open" && view && html`<${View} key=${identity} view=${view} route=${route} />`}
      ${state === "open" && !view && html`<h1>No view</h1>
        <${Empty} icon="key" title="This key may see nothing here.">It needs the scope jobs:read, or admin.<//>`}
      ${state === "down" && html`<h1>Not reachable</h1><${Empty} icon="dead" title="The service does not respond.">
        ${session.value.reason} It is tried again every few seconds.<//>`}
      ${(state === "loading" || state === "locked") && html`<h1 class="unseen">fusequeue</h1>`}
    </main>
    ${state === "locked" && html`<${KeyPrompt} />`}
    ${state === "open" && dialog === "key" && html`<${KeyPrompt} onClose=${() => setDialog(null)} />`}
    ${dialog === "help" && html`<${Help} onClose=${() => setDialog(null)} />`}
    <${Confirmation} /><${Lightbox} /><${Toasts} />
  `;
}

function skipped(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

/** A view with its heading, which gets the focus when the view changes: screen readers then read it. */
function View({ view, route }) {
  const id = view.path === "jobs" ? route.path[1] : undefined;
  const title = id ? "Job" : (view.title?.() ?? view.name);
  const heading = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    document.title = `${title} · fusequeue`;
    if (!isFirst.current) {
      heading.current.focus();
      document.querySelector(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
      scrollTo(0, 0);
    }
    isFirst.current = false;
  }, [view.path, id]);
  return html`
    <div class="view-head">
      <h1 ref=${heading} tabindex="-1">${id ? html`<a href=${withQuery("#/jobs", { tenant: route.params.get("tenant") })}>Jobs</a> <span class="hint">/</span> Job` : title}
        </h1>
      <${Connection} />
    </div>
    <${PauseBanner} />
    ${id ? html`<${JobPage} key=${id} id=${id} tenant=${tenantOf(route.params.get("tenant"))} />` : html`<${view.view} key=${view.path} params=${route.params} />`}
  `;
}

/** Whether what is shown is of now. */
function Connection() {
  const { error } = useStore(overview);
  const { connected } = useStore(live);
  const lost = error?.status === 0 || error?.passes || !connected;
  return html`<p class="connection ${lost ? "is-lost" : ""}" role="status"><i></i>${lost ? "Reconnecting …" : "Live"}
    </p>`;
}

function Side({ views, current, open }) {
  const { state, hasKey: keyed, tenant, namespace } = useStore(session);
  const { samples } = useStore(overview);
  const last = samples.at(-1);
  const badges = { now: last?.running || 0, jobs: last?.queued || 0 };
  const titles = { now: "slots running", jobs: "slots queued" };
  return html`
    <header class="side">
      <a class="brand" href="#/now"><${Mark} /><span>fusequeue</span></a>
      <nav aria-label="Views">
        ${views.map(
          ({ path, name, icon }) => html`
            <a key=${path} href="#/${path}" title=${name} aria-current=${current?.path === path ? "page" : undefined}>
              <${Icon} name=${icon} /><span class="nav-name">${name}</span>
              ${badges[path] > 0 && html`<span class="count" title=${titles[path]}>${count(badges[path])}
                <span class="unseen"> ${titles[path]}</span></span>`}
            </a>
          `,
        )}
      </nav>
      <div class="side-end">
        <a href="docs"><${Icon} name="docs" /><span class="nav-name">API reference</span></a>
        <button type="button" onClick=${() => open("help")}><${Icon} name="help" />
          <span class="nav-name">Keyboard</span><kbd>?</kbd></button>
        ${
          state === "open" &&
          keyed &&
          html`
          <button type="button" onClick=${() => open("key")}><${Icon} name="key" />
            <span class="nav-name">Change key</span></button>
          ${
            hasKey() &&
            html`<button type="button" onClick=${() => useKey(null)}><${Icon} name="leave" />
            <span class="nav-name">Forget the key</span></button>`
          }
        `
        }
        ${state === "open" && html`<p class="who hint">${keyed ? `tenant ${tenant}` : "no keys required"}
          <br />namespace ${namespace}</p>`}
      </div>
    </header>
  `;
}

/** `g` and a letter lead to a view, `?` shows the keys. */
function useShortcuts(views, help) {
  const pending = useRef(0);
  useKeys((event) => {
    if (event.key === "?") return help();
    const isPending = Date.now() - pending.current < 1_500;
    if (event.key === "g" && !isPending) return void (pending.current = Date.now());
    if (isPending) {
      const view = views.find(({ path }) => path[0] === event.key);
      if (view) {
        event.preventDefault();
        event.stopImmediatePropagation();
        go(`#/${view.path}`);
      }
    }
    pending.current = 0;
    return undefined;
  });
}

render(html`<${App} />`, document.getElementById("app"));
