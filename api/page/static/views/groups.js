// Groups of jobs, such as those of a backfill: progress, rate, time left, changes of all their jobs, and their files.

import { html } from "../vendor/htm-preact-3.1.1.js";
import { address, call, hasKey, request, withQuery } from "../core/api.js";
import { changeMatching, countMatching, save, untilNow } from "../core/actions.js";
import { count, duration, plural } from "../core/format.js";
import { go, useLoaded } from "../core/hooks.js";
import { mayWrite } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Ago, Badge, Button, Empty, ErrorNote, Facts, Panel, Progress, Skeleton, toast } from "../parts/ui.js";

const PAGE = 20;
const RETRIED = "failed,expired";
const ENDED = "succeeded,failed,canceled,expired";

const CHANGES = {
  pause: { verb: "Pause", past: "Paused", text: "Running jobs stop at their next step. Jobs that are submitted later run." },
  resume: { verb: "Resume", past: "Resumed", text: "Paused jobs go on at their steps." },
  cancel: {
    verb: "Cancel",
    past: "Canceled",
    text: "Queued jobs end at once, running ones at their next step. Jobs that wait for one of them fail.",
    danger: true,
  },
  retry: {
    verb: "Retry",
    past: "Retried",
    text: "Each failed or expired job is queued again as a new one. Those retried before are not queued twice.",
    status: RETRIED,
  },
  delete: {
    verb: "Delete",
    past: "Deleted",
    text: "The ended jobs and their images are deleted for good.",
    status: ENDED,
    danger: true,
  },
};

export function Groups({ params }) {
  const after = params.get("after") ?? "";
  const { data, error, loading, reload } = useLoaded(
    (signal) => call(withQuery("v1/groups", { limit: PAGE, after }), { signal }),
    [after],
    3_000,
  );
  const groups = data?.data ?? [];
  return html`
    <${ErrorNote} error=${error} retry=${reload} />
    ${loading && !data && html`<${Skeleton} rows=${4} />`}
    ${
      data &&
      !groups.length &&
      html`
      <${Panel} title="No groups">
        <${Empty} icon="groups" title="A group is the jobs with one name.">
          <code>fusequeue backfill</code> makes one of a file of prompts; elsewhere it is the field <code>group</code> of a job.
        <//>
      <//>
    `
    }
    <div class="stack">${groups.map((group) => html`<${Group} key=${group.name} group=${group} reload=${reload} />`)}
      </div>
    <nav class="pager" aria-label="Pages">
      ${after && html`<${Button} icon="left" action=${() => go("#/groups")}>Newest<//>`}
      ${data?.has_more && html`<${Button} action=${() => go(withQuery("#/groups", { after: data.next_cursor }))}>Older<//>`}
    </nav>
  `;
}

/** What a group does now, as a state and in words. */
function stateOf({ running, queued, paused, failed, expired, succeeded }) {
  if (running) return ["running", "running"];
  if (queued) return ["queued", "queued"];
  if (paused) return ["paused", "paused"];
  if (failed || expired) return ["failed", "ended, with failures"];
  return succeeded ? ["succeeded", "ended"] : ["canceled", "canceled"];
}

/** Change all jobs of a group, after a confirmation with their number. */
async function change(action, name, reload) {
  const { past, status, ...question } = CHANGES[action];
  const query = untilNow({ group: name, status });
  const done = await confirm({
    title: `${question.verb} the jobs of ${name}?`,
    ...question,
    count: (signal) => countMatching(action, query, { signal }),
    run: (progress, signal) => changeMatching(action, query, { progress, signal }),
  });
  if (done !== null) toast(`${past} ${plural(done, "job")}`);
  reload();
}

/** Save the files of a group; where a key is needed, which a link would not send, from memory. */
async function download(name) {
  const path = `v1/groups/${encodeURIComponent(name)}/artifacts.zip`;
  if (hasKey()) return save(await (await request(path)).blob(), `${name}.zip`);
  return location.assign(address(path));
}

function Group({ group, reload }) {
  const { name, total, jobs } = group;
  const open = jobs.queued + jobs.paused + jobs.running;
  const [state, text] = stateOf(jobs);
  const on = (action) => () => change(action, name, reload);
  return html`
    <article class="panel batch" aria-label="Group ${name}">
      <header>
        <${Badge} state=${state}>${text}<//>
        <h2>${name}</h2>
        <span class="grow"></span>
        <span class="number">${count(total - open)} of ${plural(total, "job")}${jobs.failed ? html`, <span class="fault">
          ${count(jobs.failed)} failed</span>` : ""}</span>
      </header>
      <${Progress} value=${total ? (100 * (total - open)) / total : 0} label="Jobs of ${name}" state=${state} />
      <${Facts} facts=${{
        Rate: jobs.queued + jobs.running > 0 && group.rate_per_minute > 0 && `${group.rate_per_minute.toFixed(1)} a minute`,
        "Time left": group.eta_s !== null && `about ${duration(1_000 * group.eta_s)}`,
        Running: jobs.running > 0 && count(jobs.running),
        Queued: jobs.queued > 0 && count(jobs.queued),
        Paused: jobs.paused > 0 && count(jobs.paused),
        Canceled: jobs.canceled > 0 && count(jobs.canceled),
        Expired: jobs.expired > 0 && count(jobs.expired),
        "Device time": group.device_seconds > 0 && duration(1_000 * group.device_seconds),
        "Last submit": html`<${Ago} time=${Date.parse(group.last_submitted_at)} />`,
        Jobs: html`<a href=${withQuery("#/jobs", { group: name })}>its jobs</a>`,
      }} />
      <div class="files">
        ${jobs.succeeded > 0 && html`<${Button} icon="download" action=${() => download(name)}>Download<//>`}
        ${mayWrite() && html`<${Changes} jobs=${jobs} open=${open} on=${on} />`}
      </div>
    </article>
  `;
}

const Changes = ({ jobs, open, on }) => html`
  ${jobs.queued + jobs.running > 0 && html`<${Button} icon="pause" action=${on("pause")}>Pause<//>`}
  ${jobs.paused > 0 && html`<${Button} icon="resume" action=${on("resume")}>Resume<//>`}
  ${open > 0 && html`<${Button} icon="cancel" action=${on("cancel")}>Cancel<//>`}
  ${jobs.failed + jobs.expired > 0 && html`<${Button} icon="redo" action=${on("retry")}>Retry failed<//>`}
  ${open === 0 && html`<${Button} icon="trash" action=${on("delete")}>Delete<//>`}
`;
