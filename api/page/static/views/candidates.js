// The form's `best_of`: more images begin than are kept, and a scorer drops the worst after some shares of the steps.

import { html } from "../vendor/htm-preact-3.1.1.js";
import { percent, plural } from "../core/format.js";
import { Check, Range, Text } from "../parts/fields.js";

const USUAL_AT = "0.25, 0.5";
const MOST_SHARES = 8;

/** The shares of a text. */
const sharesOf = (text) => text.split(/[\s,]+/).filter(Boolean).map(Number);

/** Half of the model's most images, of which one is kept. */
const usual = ({ limits }) => ({ candidates: Math.max(2, Math.floor(limits.max_images / 2)), keep: 1, at: USUAL_AT });

/** `best_of` of a request from the form's values, and back. */
export const bestOf = ({ candidates, keep, at }) => ({ candidates, keep, at: sharesOf(at) });
export const bestOfValues = (sent) => sent && { candidates: sent.candidates, keep: sent.keep ?? 1, at: (sent.at ?? sharesOf(USUAL_AT)).join(", ") };

/** What is wrong with the values, by field. */
export function bestOfFaults({ candidates, keep, at }, { max_images }) {
  const shares = sharesOf(at);
  const isRising = shares.every((share, index) => share > (shares[index - 1] ?? 0) && share <= 1);
  return {
    "best_of.candidates": candidates >= 2 && candidates <= max_images ? null : `from 2 to ${max_images}`,
    "best_of.keep": keep >= 1 && keep < candidates ? null : "at least 1, and fewer than begin",
    "best_of.at": shares.length && shares.length <= MOST_SHARES && isRising ? null : `1 to ${MOST_SHARES} rising shares above 0, at most 1`,
  };
}

/** How many of `best_of` of a request go on after which shares, as the service computes it. */
export function planText({ candidates, keep, at }) {
  const left = at.map((share, index) => {
    const goOn = Math.max(keep, Math.round(candidates * (keep / candidates) ** ((index + 1) / at.length)));
    return `${goOn} after ${percent(share)}`;
  });
  return `${plural(candidates, "image")} begin; ${left.join(", ")} of the steps go on.`;
}

/** How many of a job's candidates were dropped after which steps. */
export function droppedText(dropped) {
  const bySteps = Map.groupBy(dropped, ({ step }) => step);
  return [...bySteps].map(([step, some]) => `${some.length} after step ${step}`).join(", ");
}

export function Candidates({ model, values, set, faults, fault }) {
  const { best_of } = values;
  const change = (changes) => set((before) => ({ best_of: { ...before.best_of, ...changes } }));
  const isFaulty = Object.keys(faults).some((name) => name.startsWith("best_of.") && faults[name]);
  return html`
    <fieldset class="group"><legend>Candidates</legend>
      <${Check} label="Begin more images than are kept, and drop the worst early" name="best_of" value=${Boolean(best_of)} onChange=${(isOn) => set({ best_of: isOn ? usual(model) : null })} />
      ${
        best_of &&
        html`
        <div class="form-grid">
          <${Range} label="Begin" name="best_of.candidates" value=${best_of.candidates} min=${2} max=${model.limits.max_images} step=${1} fault=${faults["best_of.candidates"]} onChange=${(candidates) => change({ candidates })} />
          <${Range} label="Keep" name="best_of.keep" value=${best_of.keep} min=${1} max=${Math.max(1, best_of.candidates - 1)} step=${1} fault=${faults["best_of.keep"]} onChange=${(keep) => change({ keep })} />
          <${Text} label="Compare after these shares of the steps" name="best_of.at" value=${best_of.at} placeholder=${USUAL_AT} inputmode="decimal" fault=${faults["best_of.at"]} onChange=${(at) => change({ at })} />
        </div>
        ${!isFaulty && html`<p class="hint">${planText(bestOf(best_of))}</p>`}
      `
      }
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}
    </fieldset>
  `;
}
