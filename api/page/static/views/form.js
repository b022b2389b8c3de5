// The form of the playground, made of what the model allows.

import { html, useRef } from "../vendor/htm-preact-3.1.1.js";
import { NAMES, plural, PRIORITIES, words } from "../core/format.js";
import { mayWrite } from "../core/session.js";
import { Button } from "../parts/ui.js";
import { Drop, Drops } from "../parts/drop.js";
import { PaintMask } from "../parts/mask.js";
import { Check, Field, Range, Select, Text } from "../parts/fields.js";
import { Adapters } from "./adapters.js";
import { Candidates } from "./candidates.js";
import { limitFaults } from "./limits.js";
import { blank, fieldsOf, formFaults, needsPrompt, newControl, usualStrength } from "./request.js";
import { Start } from "./start.js";

const RATIOS = [
  ["1:1", 1],
  ["3:2", 3 / 2],
  ["2:3", 2 / 3],
  ["16:9", 16 / 9],
  ["9:16", 9 / 16],
];
/** What follows from the video of a task, if not all of it. */
const FROM_VIDEO = {
  extend_video: "Size and rate are those of the video; the frames are those of the video and of what is made",
  upscale_video: "The size follows from the video; frames and rate are those of the video",
};

export function Form({ models, model, values, setValues, fault, generate }) {
  const set = (changes) =>
    setValues((before) => ({ ...before, ...(typeof changes === "function" ? changes(before) : changes) }));
  const has = fieldsOf(values.task, model);
  const { limits } = model;
  const button = useRef(null);
  const own = { ...formFaults(values), ...limitFaults(values, model) };
  const faultOf = (name) =>
    own[name] ??
    fault?.faults.find((one) => one.param?.split(".")[0] === name)?.message ??
    (fault?.param?.split(".")[0] === name ? fault.message : null);
  const pressed = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!event.repeat) button.current.base.click();
    }
  };
  const field = (name) => ({
    name,
    value: values[name],
    fault: faultOf(name),
    onChange: (value) => set({ [name]: value }),
  });
  const isNeeded = needsPrompt(values, model);
  const best = has.candidates ? values.best_of : null;
  const count = best ? best.keep : values.n;
  const tooLong = values.prompt.length > limits.max_prompt_chars;
  const lacksPrompt = has.prompt && (tooLong || (isNeeded && !values.prompt.trim()));
  const isRefused = !mayWrite() || lacksPrompt || Object.values(own).some(Boolean);
  const chooseImages = (images) =>
    set(({ task, images: [before] }) => {
      const [first] = images;
      const isNew = task === "edit" && first?.ratio && first.id !== before?.id; // its result has its proportions
      return isNew ? { images, ...sides(first.ratio, model) } : { images };
    });
  const chooseTask = (task) =>
    set((before) => {
      const isUntouched = before.strength === usualStrength(before.task, model);
      return { task, ...(isUntouched ? { strength: usualStrength(task, model) } : {}) };
    });
  const unnamed = fault && !fault.faults.length && !fault.param;
  return html`
    <form class="panel form" aria-label="Request" onKeyDown=${pressed} onSubmit=${(event) => event.preventDefault()}>
      <div class="form-row">
        <${Select} label="Model" ...${field("model")} options=${models.map((one) => [one.id, one.id])}
          onChange=${(id) =>
            setValues(
              blank(
                models.find((one) => one.id === id),
                values,
                model,
              ),
            )} />
        ${model.tasks.length > 1 && html`<${Select} label="Task" ...${field("task")} options=${model.tasks.map((task) => [task, words(task)])} onChange=${chooseTask} />`}
      </div>
      ${
        has.prompt &&
        html`
      <${Field} label="Prompt" fault=${faultOf("prompt")} note=${`${values.prompt.length} of ${limits.max_prompt_chars}`} noteFault=${tooLong}>
        <textarea name="prompt" rows="4" required=${isNeeded} placeholder=${has.duration ? "a slow waltz for piano, warm and quiet" : "a red circle on a blue ground, left"} value=${values.prompt} onInput=${(event) => set({ prompt: event.target.value })}></textarea>
      <//>`
      }
      ${
        has.image &&
        html`
        <${Drops} label=${has.images > 1 ? `Images, up to ${has.images}` : "Image"} name="image" most=${has.images} images=${values.images} fault=${faultOf("image") ?? faultOf("images")} onChange=${chooseImages} />
      `
      }
      ${has.mask && html`<${Drop} label="Mask: white is repainted" name="mask" image=${values.mask} fault=${faultOf("mask")} onChange=${(mask) => set({ mask })} />`}
      ${has.mask && !values.mask && values.images.length > 0 && html`<${PaintMask} image=${values.images[0]} onPainted=${(mask) => set({ mask })} />`}
      ${has.last_image && html`<${Drop} label="Last frame" name="last_image" image=${values.last_image} fault=${faultOf("last_image")} onChange=${(last_image) => set({ last_image })} />`}
      ${has.video && html`<${Drop} label="Video" name="video" kind="video" image=${values.video} fault=${faultOf("video")} onChange=${(video) => set({ video })} />`}
      ${has.face_video && html`<${Drop} label="Faces, if the video is one of poses" name="face_video" kind="video" image=${values.face_video} fault=${faultOf("face_video")} onChange=${(face_video) => set({ face_video })} />`}
      ${has.video && html`<p class="hint">${FROM_VIDEO[values.task] ?? "Size, frames and rate are those of the video"} unless they are changed here.</p>`}
      ${has.duration && html`<${Sound} model=${model} values=${values} set=${set} field=${field} has=${has} />`}
      ${has.size && html`<${Size} model=${model} values=${values} set=${set} field=${field} />`}
      <div class="form-grid">
        <${Range} label="Steps" ...${field("steps")} min=${limits.min_steps} max=${limits.max_steps} step=${1} />
        <${Range} label="Guidance" ...${field("guidance_scale")} min=${0} max=${limits.max_guidance_scale} step=${0.1} />
        ${values.guidance_scale_2 !== null && html`<${Range} label="Guidance, less noisy steps" ...${field("guidance_scale_2")} min=${0} max=${limits.max_guidance_scale} step=${0.1} />`}
        ${has.strength && html`<${Range} label="Strength" ...${field("strength")} min=${0.05} max=${1} step=${0.05} />`}
        ${!best && html`<${Range} label=${NAMES[has.medium]} ...${field("n")} min=${1} max=${limits.max_images} step=${1} />`}
        ${
          has.frames &&
          html`
          <${Range} label="Frames" ...${field("frames")} min=${limits.min_frames} max=${limits.max_frames} step=${limits.frames_multiple} />
          <${Range} label="Frames per second" ...${field("fps")} min=${limits.fps ?? 1} max=${limits.fps ?? 60} step=${1} />
        `
        }
        ${has.upscale_factor && html`<${Select} label="Upscale factor" ...${field("upscale_factor")} options=${factors(model)} />`}
        ${has.layers && html`<${Range} label="Layers" ...${field("layers")} min=${1} max=${limits.max_layers} step=${1} />`}
        <${Field} label="Seed" fault=${faultOf("seed")}>
          <div class="joined">
            <input name="seed" inputmode="numeric" pattern="[0-9]*" placeholder="random" autocomplete="off" value=${values.seed} onInput=${(event) => set({ seed: event.target.value.replaceAll(/\D/g, "") })} />
            <${Button} icon="dice" label="A random seed" action=${() => set({ seed: String(Math.floor(Math.random() * 2 ** 31)) })} />
          </div>
        <//>
      </div>
      ${has.candidates && html`<${Candidates} model=${model} values=${values} set=${set} faults=${own} fault=${faultOf("best_of")} />`}
      ${has.medium !== "mesh" && html`<${Adapters} key=${model.id} model=${model} values=${values} set=${set} fault=${faultOf("adapters")} />`}
      ${has.structure && html`<${Structure} control=${has.structure} values=${values} set=${set} fault=${faultOf("controls")} />`}
      ${has.controls && !has.structure && html`<${Controls} model=${model} values=${values} set=${set} fault=${faultOf("controls")} />`}
      ${
        Object.keys(values.others).length > 0 &&
        html`<p class="hint">Sent as it was: ${Object.entries(values.others)
          .map(([name, value]) => `${words(name)} ${typeof value === "object" ? JSON.stringify(value) : value}`)
          .join(", ")}. <${Button} kind="quiet" action=${() => set({ others: {} })}>Leave it out<//></p>`
      }
      <details open=${Boolean(values.after || values.not_before)}>
        <summary>More</summary>
        <div class="form-stack">
          ${has.prompt && html`<${Text} label="Negative prompt" ...${field("negative_prompt")} />`}
          <div class="form-grid">
            ${model.schedulers.length > 0 && html`<${Select} label="Scheduler" ...${field("scheduler")} options=${[["", "the model's own"], ...model.schedulers.map((name) => [name, name])]} />`}
            ${model.step_cache.allowed.length > 0 && html`<${Select} label="Step cache" ...${field("step_cache")} options=${levels(model, values.step_cache)} />`}
            ${
              has.format &&
              html`<${Select} label="Format" ...${field("output_format")} options=${has.formats.map((name, at) => [at ? name : "", name])} />`
            }
            ${(!has.format || !has.lossless.includes(values.output_format || has.formats[0])) && html`<${Range} label="Quality" ...${field("output_quality")} min=${1} max=${100} step=${1} />`}
            <${Select} label="Priority" ...${field("priority")} options=${PRIORITIES.map((name) => [name, name])} />
            <${Text} label="Deadline, seconds" ...${field("deadline_s")} placeholder="none" inputmode="decimal" />
            ${
              values.deadline_s !== "" &&
              html`<${Select} label="When it is too late" ...${field("on_deadline")} options=${[
                ["expire", "expire"],
                ["run", "run late"],
              ]} />`
            }
            <${Text} label="Metadata" ...${field("metadata")} placeholder="key=value, …" />
          </div>
          <${Start} values=${values} set=${set} field=${field} />
          <${Check} label="Write the parameters into the files" ...${field("embed_parameters")} />
          ${
            values.output &&
            html`<p class="hint">It is sent to <code>${[values.output.bucket, values.output.prefix].filter(Boolean).join("/")}</code>.
              <${Button} kind="quiet" action=${() => set({ output: null })}>Keep it here<//></p>`
          }
          <${Check} label="Reproducible: identical bits whatever shares its batch; a lone job takes longer" ...${field("reproducible")} />
        </div>
      </details>
      ${unnamed && html`<p class="fault" role="alert">${fault.message}</p>`}
      <footer class="form-footer">
        <${Button} ref=${button} kind="primary large" icon="playground" action=${generate} disabled=${isRefused}>
          Generate${count > 1 ? ` ${plural(count, { audio: "sound", mesh: "mesh" }[has.medium] ?? "image")}` : ""}
        <//>
        <span class="hint">${mayWrite() ? html`<kbd>Ctrl</kbd> <kbd>Enter</kbd>` : "This key may not submit jobs."}
          </span>
      </footer>
    </form>
  `;
}

/** The first factor is that of a request without one. */
const factors = ({ upscale_factors }) => upscale_factors.map((factor, at) => [at ? String(factor) : "", String(factor)]);

function levels(model, chosen) {
  const named = model.step_cache.allowed.filter((level) => level !== "schedule");
  const all = [["", `default: ${model.step_cache.default}`], ...["off", ...named].map((level) => [level, level])];
  return typeof chosen === "object" ? [[chosen, `every ${chosen.every} steps`], ...all] : all;
}

/** Sides of about as many pixels as the model's default, at a ratio. */
function sides(ratio, { defaults, limits }) {
  const fit = (side) =>
    Math.max(limits.min_side, Math.min(limits.max_side, Math.round(side / limits.multiple_of) * limits.multiple_of));
  const pixels = defaults.width * defaults.height;
  return { width: fit(Math.sqrt(pixels * ratio)), height: fit(Math.sqrt(pixels / ratio)) };
}

function Sound({ model, values, set, field, has }) {
  const { limits } = model;
  const length = { min: limits.min_duration_s, max: limits.max_duration_s, step: 0.5 };
  const choose = (audio) =>
    set((before) => {
      const seconds = audio?.duration_s && Math.min(limits.max_duration_s, Math.max(limits.min_duration_s, audio.duration_s));
      return { audio, ...(seconds ? { duration_s: seconds, repaint_end_s: "" } : { duration_s: before.duration_s }) };
    });
  return html`
    ${has.audio && html`<${Drop} label="Audio" name="audio" kind="audio" image=${values.audio} fault=${field("audio").fault} onChange=${choose} />`}
    <${Field} label="Lyrics, for models that sing" fault=${field("lyrics").fault}>
      <textarea name="lyrics" rows="4" placeholder="[verse] …" value=${values.lyrics} onInput=${(event) => set({ lyrics: event.target.value })}></textarea>
    <//>
    <div class="form-grid">
      <${Range} label="Seconds" ...${field("duration_s")} ...${length} />
      ${
        has.repaint &&
        html`
        <${Range} label="Made anew from second" ...${field("repaint_start_s")} min=${0} max=${values.duration_s} step=${0.1} />
        <${Range} label="Made anew to second" ...${field("repaint_end_s")} min=${0.1} max=${values.duration_s} step=${0.1} unset="the end" />
      `
      }
    </div>
  `;
}

function Size({ model, values, set, field }) {
  const { limits } = model;
  const side = { min: limits.min_side, max: limits.max_side, step: limits.multiple_of };
  return html`
    <div class="size">
      <${Range} label="Width" ...${field("width")} ...${side} />
      <${Range} label="Height" ...${field("height")} ...${side} />
      <div class="ratios" role="group" aria-label="Ratio">
        ${ratios(model).map(([name, ratio, size]) => {
          const pressed = size.width === values.width && size.height === values.height;
          return html`<button key=${name} type="button" aria-pressed=${pressed} title="${size.width} × ${size.height}" onClick=${() => set(size)}><i style=${{ aspectRatio: String(ratio) }}></i>${name}</button>`;
        })}
      </div>
    </div>
  `;
}

/** Names, ratios and sizes; of ratios that a model's limits round to one size, the first. */
function ratios(model) {
  const sized = RATIOS.map(([name, ratio]) => [name, ratio, sides(ratio, model)]);
  const isSame = (one, other) => one.width === other.width && one.height === other.height;
  return sized.filter(([, , size], at) => sized.findIndex(([, , other]) => isSame(size, other)) === at);
}

/** The image of structure of a model that follows one: it has no scale, and applies to all steps. */
function Structure({ control: { id }, values, set, fault }) {
  const choose = (image) => set({ controls: image ? [newControl({ id, image })] : [] });
  const image = values.controls.find((control) => control.id === id)?.image ?? null;
  return html`<${Drop} label="Image to follow: ${id}" name="controls" image=${image} fault=${fault} onChange=${choose} />`;
}

function Controls({ model, values, set, fault }) {
  const changeAll = (change) => set((before) => ({ controls: change(before.controls) }));
  const change = (key, changes) =>
    changeAll((all) => all.map((control) => (control.key === key ? { ...control, ...changes } : control)));
  const add = ({ id, scale }) => changeAll((all) => [...all, newControl({ id, image: null, scale, start: 0, end: 1 })]);
  const remove = (key) => changeAll((all) => all.filter((control) => control.key !== key));
  const full = values.controls.length >= model.limits.max_controls;
  const typeOf = (control) => model.controls.find((one) => one.id === control.id);
  return html`
    <fieldset class="group"><legend>Control images</legend>
      ${values.controls.map(
        (control) => html`
          <div key=${control.key} class="control">
            <${Drop} label=${control.id} name="controls" image=${control.image} onChange=${(image) => change(control.key, { image })} />
            <div class="form-grid">
              <${Range} label="Scale" name="controls" value=${control.scale} min=${0} max=${typeOf(control)?.max_scale ?? 2} step=${0.05} onChange=${(scale) => change(control.key, { scale })} />
              ${
                typeOf(control)?.kind === "controlnet" &&
                html`
                <${Range} label="From" name="controls" value=${control.start} min=${0} max=${0.95} step=${0.05} onChange=${(start) => change(control.key, { start })} />
                <${Range} label="To" name="controls" value=${control.end} min=${0.05} max=${1} step=${0.05} onChange=${(end) => change(control.key, { end })} />
              `
              }
            </div>
            <${Button} icon="trash" action=${() => remove(control.key)}>Remove<//>
          </div>
        `,
      )}
      ${!full && html`<div class="actions">
        ${model.controls.map((one) => html`<${Button} key=${one.id} action=${() => add(one)}>Add ${one.id}<//>`)}</div>`}
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}
    </fieldset>
  `;
}
