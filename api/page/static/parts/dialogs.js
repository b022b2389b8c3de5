// Dialogs: the browser keeps the focus inside, closes them with Escape, and returns the focus.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { plural } from "../core/format.js";
import { createStore, useStore } from "../core/hooks.js";
import { session, useKey } from "../core/session.js";
import { Select } from "./fields.js";
import { Button, Progress } from "./ui.js";

/** A modal dialog while it is rendered; without `onClose` it cannot be dismissed. */
export function Dialog({ title, onClose, children, kind = "" }) {
  const dialog = useRef(null);
  useEffect(() => {
    const element = dialog.current;
    element.showModal();
    return () => element.close();
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose?.();
  };
  const closed = ({ target }) => {
    if (!target.isConnected) return;
    if (onClose) onClose();
    else target.showModal(); // Chrome closes a dialog at the second Escape although the first was prevented
  };
  const clicked = (event) => event.target === dialog.current && onClose?.();
  return html`
    <dialog ref=${dialog} class=${kind} aria-labelledby="dialog-title" onCancel=${cancel} onClose=${closed} onClick=${clicked}>
      <div class="dialog-body">
        <header><h2 id="dialog-title">${title}</h2>
          ${onClose && html`<${Button} kind="quiet" icon="close" label="Close" action=${onClose} />`}</header>
        ${children}
      </div>
    </dialog>
  `;
}

const confirmation = createStore(null);

/**
 * Ask before an action. `count(signal, choice)` is awaited and shown before the action can be confirmed;
 * `run(progress, signal, choice)` does it, and its number so far is shown. `choose` offers a choice: its `label`, its
 * `options` and the first `value`. Resolves to what `run` returns, or null.
 */
export function confirm(question) {
  return new Promise((resolve) => confirmation.set({ ...question, resolve }));
}

export function Confirmation() {
  const question = useStore(confirmation);
  return question && html`<${Question} key=${question.title} question=${question} />`;
}

function Question({ question }) {
  const { title, text, verb, count, run, choose, noun = "job", danger = false } = question;
  const [choice, setChoice] = useState(choose?.value);
  const [total, setTotal] = useState(null);
  const [done, setDone] = useState(null);
  const [error, setError] = useState(null);
  const abort = useRef(new AbortController());
  useEffect(() => () => abort.current.abort(), []);
  useEffect(() => {
    let current = true; // until another choice
    setTotal(null);
    setError(null);
    Promise.resolve(count?.(abort.current.signal, choice) ?? { total: 1 }).then(
      (counted) => current && setTotal(counted),
      (failure) => current && setError(failure),
    );
    return () => {
      current = false;
    };
  }, [choice]);
  const close = (result = null) => {
    abort.current.abort();
    if (confirmation.value === question) confirmation.set(null); // stopped, there can be another one
    question.resolve(result);
  };
  const confirmed = async () => {
    setDone(0);
    close(await run(setDone, abort.current.signal, choice));
  };
  const failed = (failure) => {
    if (failure.name !== "AbortError") setError(failure);
    setDone(null);
  };
  const matching = total && (total.more ? `more than ${plural(total.total, noun)}` : plural(total.total, noun));
  return html`
    <${Dialog} title=${title} onClose=${() => close()}>
      <p>${text}</p>
      ${choose && html`<${Select} label=${choose.label} name="choice" value=${choice} options=${choose.options} onChange=${setChoice} disabled=${done !== null} />`}
      ${count && html`<p class="counted" role="status">${total ? matching : error ? "" : "Counting …"}</p>`}
      ${
        done !== null &&
        count &&
        html`
        <${Progress} label="Done so far" value=${total?.more ? 0 : (100 * done) / Math.max(1, total?.total ?? 1)} />
        <p role="status">${plural(done, noun)} so far</p>
      `
      }
      ${error && html`<p class="fault" role="alert">${error.message}</p>`}
      <footer>
        <${Button} action=${() => close()}>${done !== null ? "Stop" : danger ? "Keep" : "Not now"}<//>
        <${Button} kind=${danger ? "danger" : "primary"} action=${confirmed} onError=${failed} disabled=${!total || total.total === 0}>
          ${verb}${count && total?.total ? ` ${matching}` : ""}
        <//>
      </footer>
    <//>
  `;
}

const UNSENDABLE = /[^!-~]/; // in a header

/** Asks for a key. It is kept in memory only. */
export function KeyPrompt({ onClose }) {
  const [key, setKey] = useState("");
  const [fault, setFault] = useState(session.value.reason);
  const submit = async () => {
    if (UNSENDABLE.test(key.trim())) setFault("No key has such characters; copy it once more.");
    else if (!(await useKey(key.trim()))) setFault(session.value.reason);
    else onClose?.();
  };
  const pressed = (event) => {
    event.preventDefault();
    event.target.querySelector(".primary").click();
  };
  return html`
    <${Dialog} title="Which key?" onClose=${onClose} kind="narrow">
      <form onSubmit=${pressed}>
        <p>This service requires an API key. <code>fusequeue keys create</code> creates one; its scopes decide what this page shows and allows.</p>
        <label class="field">
          <span>API key</span>
          <input type="password" name="key" autocomplete="off" spellcheck=${false} placeholder="fq_…" required value=${key}
            aria-describedby="key-note" aria-invalid=${Boolean(fault && key)} onInput=${(event) => setKey(event.target.value)} />
        </label>
        <p id="key-note" class="hint">It stays in this tab's memory: a reload asks for it again.</p>
        ${fault && html`<p class="fault" role="alert">${fault}</p>`}
        <footer><${Button} kind="primary" action=${submit} type="submit">Use this key<//></footer>
      </form>
    <//>
  `;
}

const KEYS = {
  Everywhere: [
    [["?"], "this overview"],
    [["g", "n"], "Now"],
    [["g", "p"], "Playground"],
    [["g", "j"], "Jobs"],
    [["g", "g"], "Groups"],
    [["g", "b"], "Batches"],
    [["g", "d"], "Dead letters"],
    [["g", "m"], "Models"],
    [["g", "t"], "Tenants"],
    [["g", "a"], "Action log"],
    [["g", "k"], "Keys"],
    [["Esc"], "close a dialog or image"],
  ],
  Playground: [
    [["Ctrl", "Enter"], "generate"],
    [["e"], "edit the prompt"],
  ],
  Jobs: [
    [["/"], "filters"],
    [["j"], "next job"],
    [["k"], "previous job"],
    [["Enter"], "open the job"],
    [["x"], "select the job"],
    [["v"], "table or gallery"],
  ],
  Images: [[["←", "→"], "previous and next image"]],
};

export const Help = ({ onClose }) => html`
  <${Dialog} title="Keyboard" onClose=${onClose}>
    <div class="keys">
      ${Object.entries(KEYS).map(
        ([name, keys]) => html`
          <section key=${name}>
            <h3>${name}</h3>
            <dl>
              ${keys.map(
                ([all, text]) =>
                  html`<div key=${text}><dt>${all.map((one) => html`<kbd>${one}</kbd>`)}</dt><dd>${text}</dd></div>`,
              )}
            </dl>
          </section>
        `,
      )}
    </div>
  <//>
`;
