// What operators have paused, and pausing and resuming.

import { call } from "./api.js";
import { refresh } from "./overview.js";

const PATHS = { all: "all", model: "models", tenant: "tenants" };

const path = (kind, name) => ["v1/pauses", PATHS[kind], ...name.split("/")].filter(Boolean).map(encoded).join("/");
const encoded = (part, index) => (index ? encodeURIComponent(part) : part);

/** Start no job of a model, of a tenant, or at all; `name` is empty for everything. */
export async function pause(kind, name, reason) {
  await call(path(kind, name), { method: "PUT", json: { reason } });
  refresh();
}

export async function resume(kind, name) {
  await call(path(kind, name), { method: "DELETE" });
  refresh();
}

/** What a pause holds back, in words. */
export const pausedText = ({ kind, name }) => (kind === "all" ? "everything" : `${kind} ${name}`);

export const pauseOf = (pauses, kind, name = "") =>
  (pauses ?? []).find((pause) => pause.kind === kind && pause.name === name);
