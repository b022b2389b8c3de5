// Plots of measured values, without an axis of time.

import { html } from "../vendor/htm-preact-3.1.1.js";
import { duration, figure, plural } from "../core/format.js";

const WIDTH = 320;
const HEIGHT = 110;
const PAD = { left: 44, right: 10, top: 8, bottom: 20 };

/** A batch cost curve: milliseconds per image by rows; the mark is at the efficient rows. */
export function CostPlot({ curve, noun }) {
  const points = curve.points.map(({ rows, seconds }) => ({ rows, seconds, each: (1_000 * seconds) / rows }));
  const most = Math.max(2, ...points.map(({ rows }) => rows), curve.efficient_rows);
  const top = Math.max(...points.map(({ each }) => each)) * 1.1;
  const x = (rows) => PAD.left + ((WIDTH - PAD.left - PAD.right) * (rows - 1)) / (most - 1);
  const y = (each) => HEIGHT - PAD.bottom - (HEIGHT - PAD.top - PAD.bottom) * (each / top);
  const line = points.map(({ rows, each }) => `${x(rows).toFixed(1)} ${y(each).toFixed(1)}`).join("L");
  const said = points.map(({ rows, seconds }) => `${rows} rows ${duration(1_000 * seconds)}`).join(", ");
  return html`
    <svg class="cost-plot" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img"
      aria-label="Cost of a forward at ${curve.shape} on ${curve.device}: ${said}; efficient up to ${curve.efficient_rows} rows">
      <line class="axis" x1=${PAD.left} x2=${WIDTH - PAD.right} y1=${y(0)} y2=${y(0)} />
      <line class="efficient" x1=${x(curve.efficient_rows)} x2=${x(curve.efficient_rows)} y1=${PAD.top} y2=${y(0)} />
      <path class="line is-running" d="M${line}" />
      ${points.map(
        ({ rows, each, seconds }) => html`
          <circle key=${rows} class="is-running" cx=${x(rows)} cy=${y(each)} r="3">
            <title>${plural(rows, "row")}: ${duration(1_000 * seconds)} a forward, ${duration(each)} ${noun}</title></circle>
        `,
      )}
      <text x=${PAD.left - 5} y=${PAD.top + 8} text-anchor="end">${figure(top / 1.1)} ms</text>
      <text x=${PAD.left - 5} y=${y(0)} text-anchor="end">0</text>
      <text x=${PAD.left} y=${HEIGHT - 5} text-anchor="middle">1</text>
      <text x=${WIDTH - PAD.right} y=${HEIGHT - 5} text-anchor="end">${most} rows</text>
    </svg>
  `;
}

/** Rows of a job's forwards in order: each part is `[rows, number of forwards with them]`. */
export function RowsPlot({ parts, forwards }) {
  const shown = parts.reduce((sum, [, times]) => sum + times, 0);
  const most = Math.max(...parts.map(([rows]) => rows));
  const said = parts.map(([rows, times]) => `${times} of ${rows}`).join(", ");
  return html`
    <div class="rows-plot" role="img" aria-label="Rows of its forwards in order: ${said}">
      ${parts.map(
        ([rows, times], index) =>
          html`<i key=${index} style=${{ flexGrow: times, height: `${(100 * rows) / most}%` }} title="${plural(times, "forward")} of ${plural(rows, "row")}"></i>`,
      )}
    </div>
    <p class="rows-ends hint"><span>first forward: ${plural(parts[0][0], "row")}</span><span>most: ${most}</span>
      <span>${shown < forwards ? `forward ${shown} of ${forwards}` : "last forward"}: ${plural(parts.at(-1)[0], "row")}</span></p>
  `;
}
