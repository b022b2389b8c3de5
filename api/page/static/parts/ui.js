// Small parts of all views.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { serverNow } from "../core/api.js";
import { ago, dateTime, jobHref, shortId } from "../core/format.js";
import { useTick } from "../core/hooks.js";
import { announce } from "../core/session.js";
import { Icon } from "./icons.js";

export const Badge = ({ state, children }) => html`<span class="badge is-${state}"><i></i>${children ?? state}</span>`;

/** A button; it is disabled while its action runs, and an error goes to `onError` or is announced. */
export function Button({ action, children, kind = "", icon, label, onError, disabled = false, ...rest }) {
  const [busy, setBusy] = useState(false);
  const mounted = useRef(true);
  useEffect(() => () => void (mounted.current = false), []);
  const clicked = async (event) => {
    event.preventDefault();
    event.stopPropagation();
    setBusy(true);
    try {
      await action(event);
    } catch (error) {
      (onError ?? toastError)(error);
    }
    if (mounted.current) setBusy(false);
  };
  return html`
    <button type="button" class="button ${kind}" aria-label=${label} title=${label} disabled=${busy || disabled} onClick=${clicked} ...${rest}>
      ${icon && html`<${Icon} name=${icon} size=${16} />`}${children && html`<span>${children}</span>`}
    </button>
  `;
}

/** Done or not, of all. */
export function Progress({ value, label, state = "running" }) {
  const share = Math.max(0, Math.min(100, value ?? 0));
  return html`
    <div class="progress is-${state}" role="progressbar" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(share)}>
      <div style=${{ width: `${share}%` }}></div>
    </div>
  `;
}

export function Panel({ title, note, actions, children, kind = "", level = 2 }) {
  const heading = `heading-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return html`
    <section class="panel ${kind}" aria-labelledby=${heading}>
      <header>
        ${level === 2 ? html`<h2 id=${heading}>${title}</h2>` : html`<h3 id=${heading}>${title}</h3>`}
        ${note && html`<p>${note}</p>`}<div class="actions">${actions}</div>
      </header>
      ${children}
    </section>
  `;
}

export const Empty = ({ icon, title, children }) => html`
  <div class="empty"><${Icon} name=${icon} size=${28} /><p class="strong">${title}</p><p>${children}</p></div>
`;

/** A text with commands between backticks. */
export const Coded = ({ text }) => text.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));

const FAULTS = { 403: "This key may not see this.", 404: "This does not exist." };

/** An error of a request, with a way to try it again where that can help. */
export const ErrorNote = ({ error, retry }) =>
  error &&
  html`
    <div class="note is-failed" role="alert">
      <${Icon} name="dead" />
      <div><p class="strong">${FAULTS[error.status] ?? "This could not be read."}</p><p>
        ${error.message}</p></div>
      ${retry && error.status !== 404 && html`<${Button} action=${retry}>Try again<//>`}
    </div>
  `;

export const Skeleton = ({ rows = 3 }) => html`
  <div class="skeleton" role="status" aria-label="Loading">${Array.from({ length: rows }, () => html`<div></div>`)}
    </div>
`;

export function Ago({ time }) {
  useTick(5_000);
  return html`<time title=${dateTime(time)}>${ago(time, serverNow())}</time>`;
}

export const JobLink = ({ id, tenant }) => html`<a class="mono nowrap" href=${jobHref({ id, tenant })} title=${id}>${shortId(id)}</a>`;

/** Copy a text, and say so. */
export function Copy({ text, label = "Copy", children }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await toClipboard(text);
    setCopied(true);
    announce("Copied");
    setTimeout(() => setCopied(false), 1_500);
  };
  return html`<${Button} kind="quiet" icon=${copied ? "check" : "copy"} label=${label} action=${copy}>${children}<//>`;
}

/** Pages over plain http have no clipboard, and others can be refused it, but may copy a selection. */
async function toClipboard(text) {
  const copies = navigator.clipboard?.writeText(text) ?? Promise.reject();
  if (await copies.then(() => true, () => false)) return;
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "unseen" });
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  if (!copied) throw new Error("The browser does not allow copying; select the text instead.");
}

let showToast = () => {};

/** Show a message for some seconds; screen readers hear it too. */
export function toast(text, state = "succeeded") {
  showToast({ text, state, id: Math.random() });
  announce(text);
}

export const toastError = (error) => error.name !== "AbortError" && toast(error.message, "failed");

export function Toasts() {
  const [toasts, setToasts] = useState([]);
  showToast = (one) => {
    setToasts((before) => [...before.slice(-3), one]);
    setTimeout(
      () => setToasts((before) => before.filter((other) => other !== one)),
      one.state === "failed" ? 9_000 : 4_000,
    );
  };
  return html`<div class="toasts">${toasts.map(({ text, state, id }) => html`<div key=${id} class="toast is-${state}">
    ${text}</div>`)}</div>`;
}

/** Definitions in two columns; those without a value are left out. */
export const Facts = ({ facts }) => html`
  <dl class="facts">
    ${Object.entries(facts)
      .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false)
      .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>
`;

/** One of a few choices. */
export const Segments = ({ label, value, options, onChange }) => html`
  <div class="segments" role="group" aria-label=${label}>
    ${options.map(
      ([name, text, icon]) => html`
        <button key=${name} type="button" aria-pressed=${value === name} onClick=${() => onChange(name)}>
          ${icon && html`<${Icon} name=${icon} size=${16} />`}<span>${text}</span>
        </button>
      `,
    )}
  </div>
`;
