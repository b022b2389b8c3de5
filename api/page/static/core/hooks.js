// What several views need of Preact and the browser.

import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.js";

/** The route of the address: `#/jobs/job_1?x=y` is `{ path: ["jobs", "job_1"], params }`. */
export function useRoute() {
  const [route, setRoute] = useState(parseRoute);
  // Before the next event: the address may change between the first drawing and an effect after it.
  useLayoutEffect(() => {
    const changed = () => setRoute(parseRoute());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

function parseRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path ? path.split("/").map(decoded) : ["now"], params: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // it was typed
  }
}

/** Go to a route, or replace the present one, so that "back" does not lead through each change of a filter. */
export function go(hash, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", hash);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = hash;
  }
}

/**
 * Load something, again every `everyMs` while the page is visible, and when `reload` is called.
 * What was loaded stays while it is loaded again, and when that fails.
 */
export function useLoaded(load, deps, everyMs = 0) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const latest = useRef(load);
  latest.current = load;
  const run = useRef(() => {});
  const loaded = useRef(null);
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    let running = false;
    let isAskedAgain = false; // what is being read can be of before a change
    const what = JSON.stringify(deps);
    if (loaded.current !== what) setState({ data: null, error: null, loading: true });
    loaded.current = what;
    run.current = async () => {
      clearTimeout(timer);
      isAskedAgain = running;
      if (running || document.hidden) return;
      running = true;
      try {
        const data = await latest.current(abort.signal);
        if (!abort.signal.aborted) setState({ data, error: null, loading: false });
      } catch (error) {
        if (!abort.signal.aborted) setState((before) => ({ ...before, error, loading: false }));
      }
      running = false;
      if (abort.signal.aborted) return;
      if (isAskedAgain) run.current();
      else if (everyMs) timer = setTimeout(run.current, everyMs);
    };
    const visible = () => run.current();
    document.addEventListener("visibilitychange", visible);
    run.current();
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", visible);
    };
  }, [...deps, everyMs]);
  return { ...state, reload: useCallback(() => run.current(), []) };
}

/** Render again every `everyMs`, for times relative to now. */
export function useTick(everyMs) {
  const [, setTick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setTick((tick) => tick + 1), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
}

/** Render again when a store of `createStore` changes, and return its value. */
export function useStore(store) {
  const [, render] = useState(0);
  useLayoutEffect(() => store.subscribe(() => render((count) => count + 1)), [store]);
  return store.value;
}

/** A value with subscribers; those are called once a frame however often it changes. */
export function createStore(value) {
  const subscribers = new Set();
  let scheduled = false;
  return {
    value,
    set(next) {
      this.value = next;
      this.changed();
    },
    changed() {
      if (scheduled) return;
      scheduled = true;
      requestAnimationFrame(() => {
        scheduled = false;
        for (const subscriber of subscribers) subscriber();
      });
    },
    subscribe(subscriber) {
      subscribers.add(subscriber);
      return () => subscribers.delete(subscriber);
    },
  };
}

/** Call `handler` for keys that are not typed into a field. */
export function useKeys(handler) {
  const latest = useRef(handler);
  latest.current = handler;
  useEffect(() => {
    const pressed = (event) => {
      const typing = event.target.closest?.("input:not([type=checkbox]), textarea, select");
      if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      latest.current(event);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}
