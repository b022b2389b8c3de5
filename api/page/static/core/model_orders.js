// Loading, unloading and pinning models on workers.

import { call } from "./api.js";
import { refresh } from "./overview.js";

/** Order an action, on the workers of a pool or, without one, on all. */
export async function orderModel(model, action, pool) {
  const json = pool ? { worker_pool: pool } : {};
  await call(`v1/models/${encodeURIComponent(model)}:${action}`, { method: "POST", json });
  refresh();
}

/** Where a worker has a model: the kind of its badge, and the words. */
export function memoryState(worker, model) {
  if (worker.loaded.includes(model)) return ["succeeded", worker.pinned.includes(model) ? "pinned" : "in memory"];
  if (worker.unavailable[model]) return ["failed", "unavailable"];
  if (worker.loading.includes(model)) return ["running", "loading"];
  return worker.kept.includes(model) ? ["queued", "in CPU memory"] : ["canceled", "not loaded"];
}
