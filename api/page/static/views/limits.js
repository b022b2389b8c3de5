// What a request's values exceed of its model's limits, found before it is sent.

import { bestOfFaults } from "./candidates.js";
import { fieldsOf } from "./request.js";

/** The faults of numbers by field. The service checks them too, and what depends on files. */
export function limitFaults(values, model) {
  const { limits } = model;
  const has = fieldsOf(values.task, model);
  const faults = {
    steps: outside(values.steps, limits.min_steps, limits.max_steps),
    guidance_scale: outside(values.guidance_scale, 0, limits.max_guidance_scale),
    guidance_scale_2: outside(values.guidance_scale_2, 0, limits.max_guidance_scale),
    n: outside(values.n, 1, limits.max_images),
    ...(has.candidates && values.best_of ? bestOfFaults(values.best_of, limits) : {}),
    strength: has.strength && !(values.strength > 0 && values.strength <= 1) ? "above 0, at most 1" : null,
    frames: has.frames ? notOfFrames(values.frames, limits) : null,
    duration_s: has.duration ? outside(values.duration_s, limits.min_duration_s, limits.max_duration_s) : null,
    ...(has.size ? { width: notASide(values.width, limits), height: notASide(values.height, limits) } : {}),
  };
  const pixels = values.width * values.height;
  if (has.size && !faults.width && !faults.height && pixels > limits.max_pixels)
    faults.height = `at most ${limits.max_pixels} pixels; ${values.width} × ${values.height} are ${pixels}`;
  return Object.fromEntries(Object.entries(faults).filter(([, fault]) => fault));
}

function outside(value, least, most) {
  if (typeof value !== "number" || (value >= least && value <= (most ?? Infinity))) return null;
  return most === null ? `at least ${least}` : `from ${least} to ${most}`;
}

const notASide = (value, { min_side, max_side, multiple_of }) =>
  outside(value, min_side, max_side) ?? (value % multiple_of ? `a multiple of ${multiple_of}` : null);

function notOfFrames(value, { min_frames, max_frames, frames_multiple }) {
  const isBetween = (value - 1) % frames_multiple !== 0;
  return outside(value, min_frames, max_frames) ?? (isBetween ? `a multiple of ${frames_multiple}, and 1 more` : null);
}
