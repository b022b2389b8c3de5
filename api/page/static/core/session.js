// Who uses the page, and what that key allows.

import { call, hasKey, setKey } from "./api.js";
import { createStore } from "./hooks.js";

/** `state`: "loading", "locked" (a key is needed), "open" or "down". */
export const session = createStore({ state: "loading", scopes: [], tenant: "", namespace: "", max_input_bytes: Infinity, same_fields: {}, hasKey: false, reason: "" });

/** Ask the service what the present key allows. */
export async function openSession() {
  try {
    const { has_key, ...rest } = await call("page/session");
    session.set({ same_fields: {}, ...rest, hasKey: has_key, state: "open", reason: "" });
  } catch (error) {
    const state = error.status === 401 ? "locked" : "down";
    const isAsked = state === "locked" && !hasKey(); // for the first time: nothing was refused
    session.set({ ...session.value, state, reason: isAsked ? "" : error.message });
  }
  return session.value.state === "open";
}

/** Use another key, or none. */
export function useKey(key) {
  setKey(key);
  return openSession();
}

export const may = (scope) => session.value.scopes.includes(scope);
export const mayRead = () => may("jobs:read");
export const mayWrite = () => may("jobs:write");
export const mayOperate = () => may("admin");
/** Whether the key may create others; where no keys are required, the first one is created by a command. */
export const mayCreateKeys = () => session.value.hasKey && mayOperate() && may("keys:create");
/** The tenant to name in requests for jobs: none for the key's own, unless it is an operator's that reads no own jobs. */
export function tenantOf(chosen) {
  const own = session.value.tenant;
  if (chosen && chosen !== own) return chosen;
  return mayRead() ? "" : own;
}
/** Whether the key may change jobs: its own tenant's, or those of a tenant that an operator has named. */
export const mayChange = (tenant) => (tenant ? mayOperate() : mayWrite());

const announcement = () => document.getElementById("announcer");

/** Say something to screen readers. */
export function announce(text) {
  const element = announcement();
  if (element) element.textContent = text;
}
