// Images, videos and sounds for a request: dropped, pasted or chosen, and uploaded at once as inputs.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { bytes, sizeText } from "../core/format.js";
import { call, local } from "../core/api.js";
import { announce, session } from "../core/session.js";
import { Icon } from "./icons.js";
import { useInputUrl } from "./media.js";
import { Button } from "./ui.js";

const TYPES = {
  image: ["image/png", "image/jpeg", "image/webp"],
  video: ["video/mp4", "video/quicktime"],
  audio: ["audio/wav", "audio/x-wav", "audio/flac", "audio/x-flac", "audio/mpeg", "audio/ogg"],
};
const NAMED = { image: "a PNG, JPEG or WebP", video: "an MP4 or MOV", audio: "a WAV, FLAC, MP3 or Ogg" };
const CHOOSE = { image: "Choose an image", video: "Choose a video", audio: "Choose a sound" };

/** Upload an image, a video or a sound; returns its id with the file to show. */
export async function upload(file, kind = "image") {
  if (!TYPES[kind].includes(file.type)) throw new Error(`${file.name || "The file"} is not ${NAMED[kind]}.`);
  const most = session.value.max_input_bytes;
  if (file.size > most) throw new Error(`${file.name || "The file"} has ${bytes(file.size)}; at most ${bytes(most)} are allowed.`);
  const body = new FormData();
  body.append("file", file, file.name || "pasted.png");
  const input = await call("v1/inputs", { method: "POST", body });
  return {
    id: input.id,
    name: file.name || "pasted",
    file,
    ratio: input.width / input.height,
    size: sizeText(input),
    duration_s: input.duration_s,
  };
}

const filesOf = (data, kind) => [...(data?.files ?? [])].filter((file) => file.type.startsWith(`${kind}/`));

/** A file that is dropped beside a field would replace the page. */
for (const name of ["dragover", "drop"]) {
  addEventListener(name, (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
}

/** Several images, videos or sounds, at most `most`; a further one replaces the last. */
export function Drops({ label, name, most, images, onChange, fault, kind = "image" }) {
  const [busy, setBusy] = useState(0);
  const [refused, setRefused] = useState(null);
  const [over, setOver] = useState(false);
  const fileInput = useRef(null);
  const latest = useRef(null); // an upload ends after other changes
  latest.current = { images, onChange };
  const add = async (files) => {
    for (const file of files.slice(0, most)) {
      setRefused(null);
      setBusy((count) => count + 1);
      try {
        const image = await upload(file, kind);
        latest.current.images = [...latest.current.images.slice(0, most - 1), image];
        latest.current.onChange(latest.current.images);
        announce(`Uploaded ${image.name}`);
      } catch (error) {
        setRefused(error.message);
      }
      setBusy((count) => count - 1);
    }
  };
  usePaste(kind, (files) => {
    if (latest.current.images.length >= most) return false;
    add(files);
    return true;
  });
  const dropped = (event) => {
    event.preventDefault();
    setOver(false);
    add([...(event.dataTransfer?.files ?? [])]);
  };
  const chosen = ({ target }) => {
    add([...target.files]);
    target.value = ""; // so that the same file can be chosen again
  };
  const dragged = (event) => {
    event.preventDefault();
    setOver(event.type !== "dragleave");
  };
  return html`
    <div class="field">
      <span>${label}</span>
      <div class="drops ${over ? "is-over" : ""}" onDragOver=${dragged} onDragEnter=${dragged} onDragLeave=${dragged} onDrop=${dropped}>
        ${images.map((image, index) => html`<${Chosen} key=${image.id} image=${image} remove=${() => onChange(images.filter((_, at) => at !== index))} />`)}
        ${
          images.length < most &&
          html`
          <button type="button" class="drop" aria-label="${CHOOSE[kind]}: ${label}" onClick=${() => fileInput.current.click()}>
            <${Icon} name="image" /><span>${busy ? "Uploading …" : "Drop, paste or choose"}</span>
          </button>
        `
        }
        <input ref=${fileInput} class="unseen" tabindex="-1" type="file" aria-label=${label} name=${name} accept=${TYPES[kind].join(",")} multiple=${most > 1}
          onChange=${chosen} />
      </div>
      ${(refused ?? fault) && html`<em class="fault" role="alert">${refused ?? fault}</em>`}
    </div>
  `;
}

/** One image, or none. */
export const Drop = ({ image, onChange, ...rest }) => html`
  <${Drops} most=${1} images=${image ? [image] : []} onChange=${(images) => onChange(images[0] ?? null)} ...${rest} />
`;

/** Files that are pasted anywhere go to the first field of their kind that has room: `take` returns whether it has. */
function usePaste(kind, take) {
  const latest = useRef(take);
  latest.current = take;
  // At once: whoever sees the field can paste.
  useLayoutEffect(() => {
    const pasted = (event) => {
      const files = filesOf(event.clipboardData, kind);
      if (!files.length || event.defaultPrevented) return;
      if (latest.current(files)) event.preventDefault();
    };
    addEventListener("paste", pasted);
    return () => removeEventListener("paste", pasted);
  }, []);
}

function Chosen({ image, remove }) {
  return html`
    <figure class="chosen">
      <${Shown} image=${image} />
      <figcaption class="cut">${image.size ?? image.name}</figcaption>
      <${Button} kind="quiet" icon="close" label="Remove ${image.name}" action=${remove} />
    </figure>
  `;
}

/** An image, a video or a sound of a request. */
export const Shown = ({ image, onLoad }) =>
  image.file ? html`<${Uploaded} image=${image} onLoad=${onLoad} />` : html`<${Stored} id=${image.id} onLoad=${onLoad} />`;

function Uploaded({ image: { file, name }, onLoad }) {
  const [url, setUrl] = useState(null);
  useEffect(() => {
    const made = URL.createObjectURL(file);
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [file]);
  if (!url) return null;
  return html`<${Medium} url=${url} text=${name} kind=${file.type.split("/")[0]} onLoad=${onLoad} />`;
}

/** An image known by its id: an input, or a job whose first image is meant. */
function Stored({ id, onLoad }) {
  const isJob = id.startsWith("job_");
  const [job, setJob] = useState(null);
  useEffect(() => {
    if (isJob) call(`v1/jobs/${id}`).then(setJob, () => {});
  }, [id]);
  if (isJob)
    return job?.artifacts[0]
      ? html`<${Medium} url=${local(job.artifacts[0].url)} text="Result of ${id}" kind=${job.artifacts[0].kind} onLoad=${onLoad} />`
      : html`<span class="missing">…</span>`;
  return html`<${StoredInput} id=${id} onLoad=${onLoad} />`;
}

function StoredInput({ id, onLoad }) {
  const url = useInputUrl(id);
  const [input, setInput] = useState(null);
  useEffect(() => {
    call(`v1/inputs/${id}`).then(setInput, () => {});
  }, [id]);
  return url && input
    ? html`<${Medium} url=${url} text="Input ${id}" kind=${input.kind} onLoad=${onLoad} />`
    : html`<span class="missing">…</span>`;
}

function Medium({ url, text, kind, onLoad }) {
  if (kind === "audio") return html`<audio controls src=${url} aria-label=${text}></audio>`;
  return kind === "video"
    ? html`<video src=${url} aria-label=${text} muted loop autoplay playsinline onLoadedData=${onLoad}></video>`
    : html`<img src=${url} alt=${text} onLoad=${onLoad} />`;
}
