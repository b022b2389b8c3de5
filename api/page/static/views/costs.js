// What forwards of a model cost by their rows: the batch cost curve of each shape that workers have measured.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { duration, plural } from "../core/format.js";
import { Select } from "../parts/fields.js";
import { CostPlot } from "../parts/plots.js";
import { Ago } from "../parts/ui.js";

const nameOf = (curve) => `${curve.shape} on ${curve.device}`;

/** The curve of one shape, at first the one with the most row counts. */
export function Costs({ curves, noun }) {
  const [chosen, setChosen] = useState(null);
  if (!curves.length) return html`<p class="hint pad">Its cost by rows is shown once workers have measured forwards.</p>`;
  const richest = curves.reduce((best, one) => (one.points.length > best.points.length ? one : best));
  const curve = curves.find((one) => nameOf(one) === chosen) ?? richest;
  const single = curve.points.find(({ rows }) => rows === 1);
  const best = curve.points.reduce((low, one) => (one.seconds / one.rows < low.seconds / low.rows ? one : low));
  const gain = single && best.rows > 1 && (single.seconds * best.rows) / best.seconds;
  return html`
    <section class="costs" aria-label="Batch cost curve">
      <div class="costs-head">
        <h3>Time of ${noun} and step, by rows of a forward</h3>
        ${
          curves.length > 1
            ? html`<${Select} label="Shape and device" name="shape" value=${nameOf(curve)} onChange=${setChosen}
                options=${curves.map((one) => [nameOf(one), nameOf(one)])} />`
            : html`<span class="hint">${nameOf(curve)}</span>`
        }
      </div>
      <${CostPlot} curve=${curve} noun=${noun} />
      <p class="hint">Efficient up to <span class="strong">${plural(curve.efficient_rows, "row")}</span>
        ${gain > 1.05 ? `; at ${best.rows} rows ${noun} takes ${duration((1_000 * best.seconds) / best.rows)}, ${gain.toFixed(1)} times less than solo` : ""}.
        Measured <${Ago} time=${curve.measured_at} />.</p>
    </section>
  `;
}
