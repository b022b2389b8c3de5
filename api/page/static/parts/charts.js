// A figure with its course over time.

import { html, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { clock, duration } from "../core/format.js";

const WIDTH = 240;
const HEIGHT = 44;
const SPAN_MS = 600_000;

/**
 * A tile: a name, its present value and its course. `lines` are `[class, value of a sample]`; a missing value is a gap.
 * The axis begins at zero, and has at least `least` at its top.
 */
export function Tile({ name, value, unit, note, samples, lines, format, least = 1 }) {
  const [hovered, setHovered] = useState(null);
  const frame = useRef(null);
  const end = samples.at(-1)?.at ?? 0;
  const begin = Math.min(samples[0]?.at ?? end, end - 60_000);
  const span = Math.min(SPAN_MS, Math.max(1, end - begin));
  const shown = samples.filter((sample) => sample.at >= end - span);
  const top = Math.max(least, ...shown.flatMap((sample) => lines.map(([, read]) => read(sample) ?? 0))) * 1.08;
  const x = (sample) => WIDTH * (1 - (end - sample.at) / span);
  const y = (number) => HEIGHT - 2 - (HEIGHT - 6) * (number / top);
  const move = (event) => {
    const box = frame.current.getBoundingClientRect();
    const at = (WIDTH * (event.clientX - box.left)) / box.width;
    const near = shown.reduce(
      (best, sample) => (Math.abs(x(sample) - at) < Math.abs(x(best) - at) ? sample : best),
      shown[0],
    );
    setHovered(near ?? null);
  };
  const peak = Math.max(0, ...shown.map((sample) => lines.at(-1)[1](sample) ?? 0));
  const summary = `${name} over ${duration(span)}: now ${value}${unit ? ` ${unit}` : ""}, at most ${format(peak)}`;
  return html`
    <div class="tile">
      <p class="tile-name">${name}</p>
      <p class="tile-value">
        ${hovered ? format(lines[0][1](hovered)) : value}<span class="unit">${unit}</span>
        <span class="tile-note">${hovered ? clock(hovered.at) : note}</span>
      </p>
      <svg ref=${frame} viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${summary}
        onPointerMove=${move} onPointerLeave=${() => setHovered(null)}>
        <line class="axis" x1="0" x2=${WIDTH} y1=${HEIGHT - 2} y2=${HEIGHT - 2} />
        ${lines.toReversed().map(([kind, read], index) => course(shown, kind, x, y, read, index === lines.length - 1))}
        ${hovered && html`<line class="cursor" x1=${x(hovered)} x2=${x(hovered)} y1="0" y2=${HEIGHT} />`}
      </svg>
    </div>
  `;
}

function course(samples, kind, x, y, read, filled) {
  const parts = [];
  let part = null;
  for (const sample of samples) {
    const value = read(sample);
    if (value === null || value === undefined) part = null;
    else if (part) part.push([x(sample), y(value)]);
    else parts.push((part = [[x(sample), y(value)]]));
  }
  return parts.map((points) => {
    const line = points.map(([left, top]) => `${left.toFixed(1)} ${top.toFixed(1)}`).join("L");
    const area = `M${points[0][0].toFixed(1)} ${HEIGHT}L${line}L${points.at(-1)[0].toFixed(1)} ${HEIGHT}Z`;
    return html`
      ${filled && points.length > 1 && html`<path class="area ${kind}" d=${area} />`}
      <path class="line ${kind}" d=${points.length > 1 ? `M${line}` : `M${line}h0.1`} />
    `;
  });
}

/** Parts of a whole, side by side; each part is `[name, value, class, text]`. */
export function Bar({ parts, label }) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  return html`
    <div class="bar" role="img" aria-label="${label}: ${parts.map(([name, , , text]) => `${name} ${text}`).join(", ")}">
      ${parts.map(
        ([name, value, kind]) =>
          html`<div key=${name} class=${kind} style=${{ flexGrow: value / total }} title=${name}></div>`,
      )}
    </div>
  `;
}
