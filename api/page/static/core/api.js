// Requests to the API. The key is in this module's memory only: a reload forgets it.

const base = new URL(".", document.baseURI);
const listeners = new Set();
let key = null;
let clockOffsetMs = 0;

/** An error response, or a request without one (status 0). */
export class ApiError extends Error {
  constructor(status, problem = {}) {
    super(problem.detail ?? problem.error?.message ?? (status ? `HTTP ${status}` : "The service does not respond."));
    this.status = status;
    this.code = problem.code ?? "";
    this.param = problem.error?.param ?? problem.errors?.[0]?.param ?? null;
    this.faults = problem.errors ?? [];
  }

  /** Whether the same request can succeed later. */
  get passes() {
    return this.status === 0 || this.status === 429 || this.status === 502 || this.status === 503;
  }
}

export function setKey(value) {
  key = value || null;
}

export const hasKey = () => key !== null;

/** The id in the key, which is no secret; null without a key. */
export const ownKeyId = () => key && key.slice(3, 13);

/** Call `listener` when a request was refused for want of a valid key; returns a function that stops it. */
export function onKeyNeeded(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The service's time in ms: that of this machine can be another. */
export const serverNow = () => Date.now() + clockOffsetMs;

/** The address of a path of the API as seen by this page, which can be behind a proxy with a prefix. */
export const address = (path) => new URL(path.replace(/^\//, ""), base).href;

/** An URL of the API as one of this page's origin: the configured public URL can be another, which the page may not load. */
export function local(url) {
  const at = url.indexOf("/v1/");
  return at < 0 ? url : address(url.slice(at));
}

/** Send a request and return its response, or throw `ApiError`. */
export async function request(path, { method = "GET", json, body, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (key !== null) all.Authorization = `Bearer ${key}`;
  if (json !== undefined) all["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path.startsWith("http") ? path : address(path), {
      method,
      headers: all,
      body: json === undefined ? body : JSON.stringify(json),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0);
  }
  noteClock(response.headers.get("date"));
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401) for (const listener of listeners) listener(problem);
  throw new ApiError(response.status, problem);
}

/** Send a request and return the JSON of its response. */
export async function call(path, options) {
  const response = await request(path, options);
  return response.status === 204 ? null : response.json();
}

/** A path with those parameters that have a value; that of metadata can be empty. */
export function withQuery(path, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    const isKept = value !== "" || name.startsWith("metadata.");
    if (value !== undefined && value !== null && isKept) query.append(name, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** Yield the server-sent events of a path. `EventSource` would not send the key. */
export async function* events(path, signal) {
  const response = await request(path, { signal, headers: { Accept: "text/event-stream" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = parsed(text.slice(0, end));
        text = text.slice(end + 2);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  let kind = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { kind, data: JSON.parse(data.join("\n")) } : null;
}

function noteClock(date) {
  const offset = date ? Date.parse(date) + 500 - Date.now() : 0; // the header has whole seconds
  clockOffsetMs = Math.abs(offset) > 2_000 ? offset : 0;
}
