// The form's values and the request body that they mean.

import { metadataText, readMetadata } from "../core/metadata.js";
import { makesSound, makesVideo, mediumOf } from "../core/format.js";
import { session } from "../core/session.js";
import { bestOf, bestOfValues } from "./candidates.js";
import { startFaults, startFields } from "./start.js";

const WITH_IMAGE = ["image_to_image", "inpaint", "edit", "upscale", "image_to_video", "animate", "image_to_mesh"];
const WITH_VIDEO = ["video_to_video", "extend_video", "upscale_video", "animate"];
const UPSCALES = ["upscale", "upscale_video"];
const WITH_AUDIO = ["audio_to_audio", "audio_inpaint"];
const WITH_STRENGTH = ["image_to_image", "inpaint", "video_to_video", "audio_to_audio"];
const SIDES = ["width", "height"];
const PLAIN = ["steps", "guidance_scale", ...SIDES];
/** Fields that no model changes, with the values that a request leaves out. */
const USUAL = {
  n: 1,
  scheduler: "",
  step_cache: "",
  output_quality: 90,
  embed_parameters: false,
  output: null,
  priority: "standard",
  reproducible: false,
};

/** Which fields a task has on a model. */
export function fieldsOf(task, model) {
  const video = makesVideo(task);
  const sound = makesSound(task);
  const mesh = task.endsWith("mesh");
  return {
    medium: mediumOf(task),
    prompt: !mesh,
    size: !sound && !mesh && !UPSCALES.includes(task), // it follows from the image or the video
    duration: sound,
    audio: WITH_AUDIO.includes(task),
    repaint: task === "audio_inpaint",
    formats: sound ? ["wav", "flac", "mp3", "opus"] : ["png", "jpeg", "webp"],
    lossless: sound ? ["wav", "flac"] : ["png"],
    image: WITH_IMAGE.includes(task),
    images: task === "edit" || mesh ? model.limits.max_input_images : 1,
    mask: task === "inpaint",
    last_image: task === "image_to_video" && model.limits.last_image !== "refused",
    video: WITH_VIDEO.includes(task),
    face_video: task === "animate",
    strength: WITH_STRENGTH.includes(task),
    frames: video,
    upscale_factor: UPSCALES.includes(task) && model.upscale_factors.length > 1,
    layers: model.limits.max_layers > 0 && !sound,
    candidates: Boolean(model.scorer) && mediumOf(task) === "image" && model.limits.max_images > 1,
    controls: model.controls.length > 0 && ["text_to_image", "image_to_image", "inpaint"].includes(task),
    // Beside the image to change: each job has it, the model has no other control.
    structure: WITH_IMAGE.includes(task) && task !== "edit" && model.controls.find((control) => control.kind === "structure"),
    format: !video && !mesh,
  };
}

/** The strength of a request without one. */
export const usualStrength = (task, model) => (task === "inpaint" ? 1 : model.defaults.strength);

/** The values of an untouched form; the prompts and the images of the form `before`, of another model, are kept. */
export function blank(model, before = null, modelBefore = null) {
  const { defaults } = model;
  const withImage = before?.images?.length && model.tasks.find((task) => WITH_IMAGE.includes(task));
  const task = withImage || model.tasks[0];
  const isKept = before && before.negative_prompt !== (modelBefore.defaults.negative_prompt ?? "");
  return {
    ...USUAL,
    model: model.id,
    task,
    prompt: before?.prompt ?? "",
    negative_prompt: isKept ? before.negative_prompt : (defaults.negative_prompt ?? ""),
    width: defaults.width,
    height: defaults.height,
    steps: defaults.steps,
    guidance_scale: defaults.guidance_scale,
    guidance_scale_2: defaults.guidance_scale_2,
    strength: usualStrength(task, model),
    frames: defaults.frames,
    fps: defaults.fps,
    duration_s: defaults.duration_s,
    lyrics: before?.lyrics ?? "",
    audio: before?.audio ?? null,
    repaint_start_s: 0,
    repaint_end_s: "", // the end, however long the sound is
    upscale_factor: "",
    layers: defaults.layers,
    seed: "",
    adapters: {},
    controls: [],
    images: before?.images ?? [],
    mask: before?.mask ?? null,
    last_image: null,
    video: before?.video ?? null,
    face_video: null,
    output_format: "",
    best_of: null,
    deadline_s: "",
    on_deadline: "expire",
    not_before: "",
    after: "",
    on_parent_failure: "fail",
    metadata: "",
    others: {},
  };
}

/** Whether the form sends nothing without a prompt: Redux varies an image without words, and an upscaler follows it. */
export function needsPrompt(values, model) {
  const has = fieldsOf(values.task, model);
  const redux = model.controls.filter((control) => control.kind === "redux").map((control) => control.id);
  return has.prompt && !UPSCALES.includes(values.task) && !(has.controls && values.controls.some((one) => one.image && redux.includes(one.id)));
}

/** The request body of the values: only what differs from the model's defaults, so that it is short to read. */
export function bodyFrom(values, model) {
  const { defaults } = model;
  const has = fieldsOf(values.task, model);
  const body = { model: values.model };
  const put = (name, value, other) => {
    if (value !== "" && value !== null && value !== undefined && value !== other) body[name] = value;
  };
  if (has.prompt) put("prompt", values.prompt.trim() && values.prompt);
  if (has.prompt && values.negative_prompt !== (defaults.negative_prompt ?? "")) body.negative_prompt = values.negative_prompt;
  for (const name of PLAIN) {
    if (has.size || !SIDES.includes(name)) put(name, values[name], defaults[name]);
  }
  if (has.duration) {
    put("duration_s", values.duration_s, defaults.duration_s);
    put("lyrics", values.lyrics);
  }
  if (has.audio && values.audio) body.audio = values.audio.id;
  if (has.repaint) {
    body.repaint_start_s = values.repaint_start_s;
    put("repaint_end_s", values.repaint_end_s);
  }
  // A result of an image without sides gets those of the image, whatever the form shows.
  if (has.image && has.size && !has.frames) Object.assign(body, { width: values.width, height: values.height });
  put("seed", values.seed === "" ? "" : Number(values.seed));
  put("guidance_scale_2", values.guidance_scale_2, defaults.guidance_scale_2);
  for (const [name, usual] of Object.entries(USUAL)) put(name, values[name], usual);
  if (has.candidates && values.best_of) {
    body.best_of = bestOf(values.best_of);
    delete body.n; // it is what is kept
  }
  if (has.strength) put("strength", values.strength, usualStrength(values.task, model));
  if (has.frames) {
    put("frames", values.frames, defaults.frames);
    put("fps", values.fps, defaults.fps);
  }
  if (has.upscale_factor) put("upscale_factor", values.upscale_factor && Number(values.upscale_factor));
  if (has.layers) put("layers", values.layers, defaults.layers);
  const ids = values.images.map((image) => image.id).slice(0, has.images);
  if (has.image && ids.length === 1) body.image = ids[0];
  if (has.image && ids.length > 1) body.images = ids;
  if (has.mask && values.mask) body.mask = values.mask.id;
  if (has.last_image && values.last_image) body.last_image = values.last_image.id;
  if (has.video && values.video) body.video = values.video.id;
  if (has.face_video && values.face_video) body.face_video = values.face_video.id;
  const adapters = Object.entries(values.adapters).map(([id, scale]) => ({ id, scale }));
  if (adapters.length) body.adapters = adapters;
  if (has.controls && values.controls.length) body.controls = values.controls.map(controlOf);
  if (has.format) put("output_format", values.output_format, has.formats[0]);
  if (values.deadline_s !== "") {
    const seconds = Number(values.deadline_s);
    body.deadline_s = Number.isFinite(seconds) ? seconds : values.deadline_s; // the service refuses a text
    put("on_deadline", values.on_deadline, "expire");
  }
  Object.assign(body, startFields(values), values.others);
  const { metadata } = readMetadata(values.metadata);
  if (Object.keys(metadata).length) body.metadata = metadata;
  if (isAmbiguous(values.task, body, model)) body.task = values.task;
  return body;
}

/** What is wrong whatever the model is, by field, such as metadata without a pair and a seed that JavaScript rounds. */
export function formFaults(values) {
  const isRounded = Number(values.seed) > Number.MAX_SAFE_INTEGER;
  return {
    ...startFaults(values),
    seed: isRounded ? `seed is at most ${Number.MAX_SAFE_INTEGER} here; the API takes larger ones` : null,
    metadata: readMetadata(values.metadata).fault,
  };
}

let controls = 0;

/** A control of the form, with a key of its own: an image can arrive after another control was removed. */
export const newControl = (fields) => ({ ...fields, key: (controls += 1) });

const controlOf = ({ key: _, image, ...rest }) => (image ? { ...rest, image: image.id } : rest);

/** Whether the other fields leave several tasks of the model, or another one, so that the request must name its task. */
function isAmbiguous(task, body, model) {
  if (makesSound(task)) {
    const repaints = "repaint_start_s" in body;
    return !model.tasks.every(makesSound) || "audio" in body !== WITH_AUDIO.includes(task) || repaints !== (task === "audio_inpaint");
  }
  const image = "image" in body || "images" in body;
  if ("video" in body !== WITH_VIDEO.includes(task)) return true;
  if (image !== WITH_IMAGE.includes(task)) return true; // incomplete: the service names the missing field
  if (task === "inpaint") return !("mask" in body);
  if ("video" in body) return model.tasks.filter((one) => WITH_VIDEO.includes(one) && WITH_IMAGE.includes(one) === image).length > 1;
  const others = model.tasks.filter((one) => one !== "inpaint" && !WITH_VIDEO.includes(one));
  return others.filter((one) => WITH_IMAGE.includes(one) === image).length > 1;
}

const reference = (id) => ({ id, name: id });

/** The values that mean a request body. */
export function valuesFrom(body, models) {
  const model = models.find((one) => one.id === body.model) ?? models[0];
  const values = blank(model);
  for (const [name, value] of Object.entries(body)) {
    if (name in values && value !== undefined && typeof values[name] !== "object") values[name] = value;
  }
  // Fields that the form does not show are kept as they are.
  const isOther = ([name]) => name in session.value.same_fields && !(name in values);
  values.others = Object.fromEntries(Object.entries(body).filter(isOther));
  values.model = model.id;
  values.seed = body.seed === undefined ? "" : String(body.seed);
  values.step_cache = body.step_cache ?? "";
  values.upscale_factor = model.upscale_factors.indexOf(body.upscale_factor) > 0 ? String(body.upscale_factor) : "";
  values.guidance_scale_2 = body.guidance_scale_2 ?? model.defaults.guidance_scale_2;
  values.images = (body.images ?? (body.image ? [body.image] : [])).map(reference);
  values.audio = body.audio ? reference(body.audio) : null;
  values.duration_s = body.duration_s ?? model.defaults.duration_s;
  values.repaint_start_s = body.repaint_start_s ?? 0;
  values.repaint_end_s = body.repaint_end_s ?? "";
  values.mask = body.mask ? reference(body.mask) : null;
  values.last_image = body.last_image ? reference(body.last_image) : null;
  values.video = body.video ? reference(body.video) : null;
  values.face_video = body.face_video ? reference(body.face_video) : null;
  values.adapters = Object.fromEntries((body.adapters ?? []).map(({ id, scale }) => [id, scale]));
  values.controls = (body.controls ?? []).map((one) => newControl({ ...one, image: reference(one.image) }));
  values.output = body.output ?? null;
  values.best_of = bestOfValues(body.best_of ?? null);
  values.metadata = metadataText(body.metadata ?? {});
  if (!body.task && values.video) {
    const wanted = values.images.length ? ["animate"] : ["video_to_video", "extend_video", "upscale_video"];
    values.task = wanted.find((task) => model.tasks.includes(task)) ?? wanted[0];
  } else if (!body.task && values.images.length) {
    const wanted = values.mask ? ["inpaint"] : ["image_to_image", "edit", "upscale", "image_to_video", "image_to_mesh"];
    values.task = wanted.find((task) => model.tasks.includes(task)) ?? values.task;
  }
  if (!body.task && values.audio) {
    const wanted = "repaint_end_s" in body || "repaint_start_s" in body ? "audio_inpaint" : "audio_to_audio";
    values.task = model.tasks.includes(wanted) ? wanted : values.task;
  }
  values.strength = body.strength ?? usualStrength(values.task, model);
  return values;
}
