// What the list of jobs offers to do: to those selected, or to all that match its filters, after a count.

import { html } from "../vendor/htm-preact-3.1.1.js";
import {
  cancelJob,
  changeMatching,
  countMatching,
  deleteJob,
  each,
  queryOf,
  retryJob,
  untilNow,
  updateJob,
} from "../core/actions.js";
import { ended, PRIORITIES, plural } from "../core/format.js";
import { announce } from "../core/session.js";
import { confirm } from "../parts/dialogs.js";
import { Button, toast, toastError } from "../parts/ui.js";
import { FILTERS } from "./filters.js";

const OPEN = ["queued", "running"];
const RETRIED = ["failed", "canceled", "expired"];
const ENDED = ["succeeded", ...RETRIED];

/** The choice of a priority in a confirmation. */
export const choosePriority = (value = "interactive") => ({
  label: "Priority",
  value,
  options: PRIORITIES.map((name) => [name, name]),
});

const isFiltered = (filters) => FILTERS.some((name) => filters[name]);

/** `title` of all jobs, and of those that match filters. */
const ALL = {
  cancel: {
    verb: "Cancel",
    past: "Canceled",
    title: ["Cancel all open jobs?", "Cancel all jobs that match?"],
    text: "Queued jobs end at once, running ones at their next step. Jobs that wait for one of them fail.",
    states: OPEN,
    danger: true,
  },
  update: {
    verb: "Update",
    past: "Updated",
    title: ["Change the priority of all queued jobs?", "Change the priority of all jobs that match?"],
    text: "Queued jobs get another priority. They keep their age; running ones do not change.",
    states: ["queued"],
    choose: choosePriority(),
  },
  retry: {
    verb: "Retry",
    past: "Retried",
    title: ["Retry all failed, canceled and expired jobs?", "Retry all jobs that match?"],
    text: "Each job is queued again as a new one with the same request. Those retried before are not queued twice.",
    states: RETRIED,
  },
  delete: {
    verb: "Delete",
    past: "Deleted",
    title: ["Delete all ended jobs?", "Delete all jobs that match?"],
    text: "The jobs and their results are deleted for good.",
    states: ENDED,
    danger: true,
  },
};

/** Change all jobs that match the filters when it asks, after a confirmation with their number. */
async function changeAll(action, filters) {
  const { past, states, ...question } = ALL[action];
  const statuses = filters.status ? filters.status.split(",").filter((state) => states.includes(state)) : states;
  const query = untilNow(queryOf({ ...filters, status: statuses.join(",") }));
  const body = (priority) => (priority ? { priority } : undefined);
  const done = await confirm({
    ...question,
    title: question.title[Number(isFiltered(filters))],
    count: (signal, choice) =>
      statuses.length ? countMatching(action, query, { json: body(choice), signal }) : { total: 0 },
    run: (progress, signal, choice) => changeMatching(action, query, { json: body(choice), progress, signal }),
  });
  if (done !== null) toast(`${past} ${plural(done, "job")}`);
}

export function JobActions({ jobs, selected, filters, reload }) {
  const chosen = jobs.filter((job) => selected.has(job.id));
  return html`
    <div class="actions">
      ${chosen.length ? html`<${OfSelected} chosen=${chosen} tenant=${filters.tenant} reload=${reload} />` : html`<${OfAll} filters=${filters} reload=${reload} />`}
    </div>
  `;
}

function OfSelected({ chosen, tenant, reload }) {
  const ids = (includes) => chosen.filter(includes).map((job) => job.id);
  const open = ids((job) => !ended(job.status));
  const queued = ids((job) => job.status === "queued");
  const failed = ids((job) => RETRIED.includes(job.status));
  const closed = ids((job) => ended(job.status));
  const on = (verb, of, action) => async () => {
    const { done, failure } = await each(of, (id) => action(id, tenant));
    if (failure) toastError(failure);
    else toast(`${verb} ${plural(done, "job")}`);
    reload();
  };
  const ask = (action, of, change) => async () => {
    const { verb, past, text, danger, choose } = ALL[action];
    const outcome = await confirm({
      title: `${verb} the selected jobs?`,
      text,
      verb,
      danger,
      choose,
      count: () => ({ total: of.length }),
      run: (progress, signal, choice) => each(of, (id) => change(id, choice), progress, signal),
    });
    if (outcome?.failure) toastError(outcome.failure);
    else if (outcome) announce(`${past} ${plural(outcome.done, "job")}`);
    reload();
  };
  return html`
    <span class="hint">${chosen.length} selected</span>
    ${open.length > 0 && html`<${Button} icon="cancel" action=${on("Canceled", open, cancelJob)}>Cancel ${open.length}<//>`}
    ${queued.length > 0 && html`<${Button} icon="edit" action=${ask("update", queued, (id, priority) => updateJob(id, { priority }, tenant))}>Priority of ${queued.length}<//>`}
    ${failed.length > 0 && html`<${Button} icon="redo" action=${ask("retry", failed, (id) => retryJob(id, tenant))}>Retry ${failed.length}<//>`}
    ${closed.length > 0 && html`<${Button} icon="trash" action=${ask("delete", closed, (id) => deleteJob(id, tenant))}>Delete ${closed.length}<//>`}
  `;
}

function OfAll({ filters, reload }) {
  const filtered = isFiltered(filters);
  const on = (action) => async () => {
    await changeAll(action, filters);
    reload();
  };
  return html`
    <${Button} icon="cancel" action=${on("cancel")}>${filtered ? "Cancel all matching" : "Cancel all open"}<//>
    <${Button} icon="edit" action=${on("update")}>${filtered ? "Priority of all matching" : "Priority of all queued"}<//>
    <${Button} icon="redo" action=${on("retry")}>${filtered ? "Retry all matching" : "Retry all failed"}<//>
    <${Button} icon="trash" action=${on("delete")}>${filtered ? "Delete all matching" : "Delete all ended"}<//>
  `;
}
