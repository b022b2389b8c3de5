// When a job of the form starts: not before a time, and after other jobs.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { call, serverNow } from "../core/api.js";
import { shortId, stateText, words } from "../core/format.js";
import { useLoaded } from "../core/hooks.js";
import { Field, Select, Text } from "../parts/fields.js";

const DAY_MS = 86_400_000;
const MOST_DAYS = 30;
const MOST_PARENTS = 16;
const JOB_ID = /^job_[0-9a-hjkmnp-tv-z]{26}$/;
/** In seconds. */
const DELAYS = [
  ["in 10 min", 600],
  ["in 1 h", 3_600],
  ["in 8 h", 28_800],
  ["in 24 h", 86_400],
];

const idsOf = (text) => [...new Set(text.split(/[\s,]+/).filter(Boolean))];

const isDelay = (not_before) => typeof not_before === "number";

/** The fields of a request from the form's values. */
export function startFields({ not_before, after, on_parent_failure }) {
  const fields = {};
  if (not_before) fields.not_before = isDelay(not_before) ? not_before : new Date(not_before).toISOString();
  const ids = idsOf(after);
  if (ids.length) fields.after = ids;
  if (ids.length && on_parent_failure !== "fail") fields.on_parent_failure = on_parent_failure;
  return fields;
}

/** What is wrong with the values, by field. */
export function startFaults({ not_before, after }) {
  const ids = idsOf(after);
  const other = ids.find((id) => !JOB_ID.test(id));
  return {
    not_before: new Date(not_before) - serverNow() > MOST_DAYS * DAY_MS ? `at most ${MOST_DAYS} days from now` : null,
    after: other ? `${other.slice(0, 40)} is not the id of a job` : ids.length > MOST_PARENTS ? `at most ${MOST_PARENTS} jobs` : null,
  };
}

export function Start({ values, set, field }) {
  const { not_before } = values;
  const time = isDelay(not_before) ? "" : not_before;
  const hasPassed = time && new Date(time) <= serverNow();
  return html`
    <fieldset class="group"><legend>Start</legend>
      <${Field} label="Not before" fault=${field("not_before").fault} note=${hasPassed ? "it has passed: at once" : ""}>
        <input type="datetime-local" name="not_before" value=${time} onInput=${(event) => set({ not_before: event.target.value })} />
      <//>
      <div class="ratios" role="group" aria-label="Delay">
        ${DELAYS.map(([name, seconds]) => html`<button key=${name} type="button" aria-pressed=${not_before === seconds} onClick=${() => set({ not_before: seconds })}>${name}</button>`)}
        <button type="button" aria-pressed=${!not_before} onClick=${() => set({ not_before: "" })}>at once</button>
      </div>
      <${Text} label="After the end of these jobs" ...${field("after")} placeholder="job_…, job_…" spellcheck=${false} />
      <div class="form-grid">
        <${OpenJobs} chosen=${idsOf(values.after)} add=${(id) => set((before) => ({ after: [...idsOf(before.after), id].join(", ") }))} />
        ${
          values.after.trim() &&
          html`<${Select} label="If one of them does not succeed" ...${field("on_parent_failure")} options=${[
            ["fail", "fail"],
            ["run", "run all the same"],
          ]} />`
        }
      </div>
    </fieldset>
  `;
}

/** A choice of the latest jobs that have not ended, which are read when it is opened. */
function OpenJobs({ chosen, add }) {
  const [asked, setAsked] = useState(0);
  const read = (signal) => (asked ? call("v1/jobs?status=queued,running&limit=30", { signal }) : { data: [] });
  const { data } = useLoaded(read, [asked]);
  const open = (data?.data ?? []).filter((job) => !chosen.includes(job.id));
  const name = (job) => `${stateText(job)} · ${(job.prompt || words(job.task)).slice(0, 40)} · ${shortId(job.id)}`;
  return html`
    <label class="field"><span>Add an open job</span>
      <select name="open_job" value="" onFocus=${() => setAsked(Date.now())} onChange=${({ target }) => {
        if (target.value) add(target.value);
        target.value = "";
      }}>
        <option value="">${data && asked && !open.length ? "none" : "choose"}</option>
        ${open.map((job) => html`<option key=${job.id} value=${job.id}>${name(job)}</option>`)}
      </select>
    </label>
  `;
}
