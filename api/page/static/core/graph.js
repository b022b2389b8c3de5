// Jobs that wait for each other: where they stand in a picture, and which of them the end of one fails.

import { ended } from "./format.js";

const MOST_SHIFT = 3; // rows by which a short column is moved down, to stand beside the middle of a long one

/** The parents of a job among those of a graph. */
const parentsIn = (job, byId) => job.parents.map((id) => byId.get(id)).filter(Boolean);

/**
 * Jobs with their `column` and `row`, in reading order, and the `arrows` between them. The column is the longest way from
 * a job that waits for none of them; within one, jobs stand as their parents do.
 */
export function arrange(jobs) {
  const byId = new Map(jobs.map((job) => [job.id, job]));
  const columns = new Map();
  const columnOf = (job) => {
    if (!columns.has(job.id)) {
      columns.set(job.id, 0);
      columns.set(job.id, Math.max(-1, ...parentsIn(job, byId).map(columnOf)) + 1);
    }
    return columns.get(job.id);
  };
  const levels = []; // none is empty: a parent of each job is in the one before
  for (const job of jobs) (levels[columnOf(job)] ??= []).push(job);
  const most = Math.max(0, ...levels.map((level) => level.length));
  const rows = new Map();
  const nodes = [];
  for (const [column, unordered] of levels.entries()) {
    const place = (job) => mean(parentsIn(job, byId).map(({ id }) => rows.get(id)));
    const level = unordered.toSorted((a, b) => place(a) - place(b) || (a.id < b.id ? -1 : 1));
    const shift = Math.min(MOST_SHIFT, (most - level.length) / 2);
    level.forEach((job, at) => {
      rows.set(job.id, at + shift);
      nodes.push({ job, column, row: at + shift, parents: parentsIn(job, byId) });
    });
  }
  const nodeOf = new Map(nodes.map((node) => [node.job.id, node]));
  const arrows = nodes.flatMap((to) => to.parents.map(({ id }) => ({ from: nodeOf.get(id), to })));
  return { nodes, arrows, columns: levels.length, rows: Math.max(0, ...rows.values()) + 1 };
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);

/** The jobs of a graph that fail if one of them does not succeed: those that wait for it, and for these. */
export function failingWith(id, jobs) {
  const failing = new Set([id]);
  for (let before = 0; before < failing.size; ) {
    before = failing.size;
    for (const job of jobs) {
      if (!ended(job.status) && job.fails_with.some((parent) => failing.has(parent))) failing.add(job.id);
    }
  }
  failing.delete(id);
  return jobs.filter((job) => failing.has(job.id));
}
