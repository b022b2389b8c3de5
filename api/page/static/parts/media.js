// Images and videos of jobs, input images, and the lightbox.

import { html, useEffect, useState } from "../vendor/htm-preact-3.1.1.js";
import { local, request } from "../core/api.js";
import { save } from "../core/actions.js";
import { bytes, count, jobHref, plural, sizeText, words } from "../core/format.js";
import { createStore, useStore } from "../core/hooks.js";
import { hasKey } from "../core/api.js";
import { Dialog } from "./dialogs.js";
import { Icon } from "./icons.js";
import { isSound, SoundView } from "./sound.js";
import { Button, Copy } from "./ui.js";

export const isVideo = (artifact) => artifact.kind === "video";
export const isMesh = (artifact) => artifact.kind === "mesh";
const isLatents = (artifact) => artifact.kind === "latents"; // of a job that another one continues: no image yet

const lightbox = createStore(null);

/** Show images large; each is `{ job, artifact }`. */
export const enlarge = (images, index = 0) => lightbox.set({ images, index });

/** What a result shows, in words. */
const subject = (job) => job.prompt || words(job.task);

/** The address of a picture of a result; null for a mesh or sound without a thumbnail, as it was sent elsewhere. */
const still = (artifact) => artifact.thumbnail_url ?? (isMesh(artifact) || isSound(artifact) ? null : artifact.url);

/** A finished image, or a picture of a video, sound or mesh, as a button that enlarges it; large, a sound has its
 * player. */
export function ArtifactView(props) {
  return isSound(props.artifact) && props.size === "large" ? html`<${SoundView} ...${props} />` : html`<${Enlargeable} ...${props} />`;
}

function Enlargeable({ job, artifact, others, size = "" }) {
  const plays = isVideo(artifact) || isSound(artifact);
  const picture = still(artifact);
  const src = picture && local(picture);
  const [missing, setMissing] = useState(null); // an address; a later one can be signed again
  const images = others ?? job.artifacts.map((one) => ({ job, artifact: one }));
  const open = () =>
    enlarge(
      images,
      Math.max(
        0,
        images.findIndex((one) => one.artifact.url === artifact.url),
      ),
    );
  return html`
    <button type="button" class="artifact ${size}" onClick=${open} aria-label="Enlarge: ${subject(job).slice(0, 120)}">
      ${
        isLatents(artifact)
          ? html`<span class="missing">latents</span>`
          : src === null || missing === src
            ? html`<span class="missing">${artifact.location ? `at ${artifact.location}` : "no longer kept"}</span>`
            : html`<img src=${src} alt=${subject(job)} loading="lazy" decoding="async" width=${artifact.width} height=${artifact.height} onError=${() => setMissing(src)} />`
      }
      ${plays && html`<span class="tag">
        ${artifact.duration_s ? `${artifact.duration_s.toFixed(1)} s` : "video"}</span>`}
      ${isMesh(artifact) && html`<span class="tag">${plural(artifact.faces, "face")}</span>`}
      ${artifact.flagged && html`<span class="tag">flagged</span>`}
    </button>
  `;
}

/** The address of an input image: where keys are required, its bytes are fetched with the key. */
export function useInputUrl(id) {
  const [url, setUrl] = useState(null);
  useEffect(() => {
    if (!id.startsWith("in_")) return; // it is an artifact, which its own job shows
    const path = `v1/inputs/${id}/content`;
    if (!hasKey()) return setUrl(new URL(path, document.baseURI).href);
    let made = null;
    let closed = false;
    request(path)
      .then((response) => response.blob())
      .then(
        (blob) => closed || setUrl((made = URL.createObjectURL(blob))),
        () => setUrl(null),
      );
    return () => {
      closed = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [id]);
  return url;
}

/** An input of a job; that of another tenant's is only named, as the service gives it to nobody else. */
export function InputImage({ image, name, isForeign }) {
  if (image.id === null) return html`<figure class="input-image"><${InputCaption} image=${image} name=${name} /></figure>`;
  if (isForeign) return html`<figure class="input-image"><figcaption>${name} · ${sizeText(image)} <span class="mono">${image.id}</span></figcaption></figure>`;
  return html`<${OwnInput} image=${image} name=${name} />`;
}

/** What an input is, and the job whose result it is or will be. */
const InputCaption = ({ image, name }) =>
  html`<figcaption>${name} · ${sizeText(image)}${image.job && html` of <a class="mono" href=${jobHref({ id: image.job })}>${image.job}</a>`}</figcaption>`;

function OwnInput({ image, name }) {
  const url = useInputUrl(image.id);
  return html`
    <figure class="input-image">
      ${
        image.content_type.startsWith("image/")
          ? url
            ? html`<img src=${url} alt="Input: ${name}" loading="lazy" />`
            : html`<span class="missing">…</span>`
          : image.content_type.startsWith("video/")
            ? html`<video src=${url} aria-label="Input: ${name}" controls muted loop playsinline></video>`
          : image.content_type.startsWith("audio/")
            ? url && html`<audio controls preload="metadata" src=${url} aria-label="Input: ${name}"></audio>`
            : html`<span class="missing">latents</span>`
      }
      <${InputCaption} image=${image} name=${name} />
    </figure>
  `;
}

/** Save a result, fetched so that its name is the job's. */
export async function download(job, artifact) {
  const response = await request(local(artifact.url));
  const type = artifact.content_type.split("/")[1];
  const suffix = { mpeg: "mp3", ogg: "opus", "gltf-binary": "glb" }[type] ?? type;
  save(await response.blob(), `${job.id}-${artifact.index}.${suffix}`);
}

const KINDS = { video: "Video", audio: "Sound", mesh: "Mesh", latents: "Latents" };

export function Lightbox() {
  const shown = useStore(lightbox);
  useEffect(() => {
    if (!shown) return undefined;
    const pressed = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) turn(shown, step);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [shown]);
  if (!shown) return null;
  const { images, index } = shown;
  const { job, artifact } = images[index];
  const src = local((isMesh(artifact) && artifact.thumbnail_url) || artifact.url);
  const place = images.length > 1 ? `${index + 1} of ${images.length}` : (KINDS[artifact.kind] ?? "Image");
  return html`
    <${Dialog} title=${place} kind="lightbox" onClose=${() => lightbox.set(null)}>
      <div class="stage">
        ${
          isVideo(artifact)
            ? html`<video key=${src} src=${src} controls loop autoplay muted playsinline aria-label=${subject(job)}>
              </video>`
            : isLatents(artifact)
              ? html`<span class="missing">latents</span>`
              : isSound(artifact)
                ? html`<${SoundView} key=${src} job=${job} artifact=${artifact} size="large" />`
                : html`<img key=${src} src=${src} alt=${subject(job)} />`
        }
        ${
          images.length > 1 &&
          html`
          <${Button} kind="turn previous" icon="left" label="Previous result" action=${() => turn(shown, -1)} />
          <${Button} kind="turn next" icon="right" label="Next result" action=${() => turn(shown, 1)} />
        `
        }
      </div>
      <div class="caption">
        <p>${subject(job)}</p>
        <p class="hint">${job.model} · ${isMesh(artifact) ? meshText(artifact) : sizeText(artifact)} · seed ${artifact.seed} · ${bytes(artifact.bytes)}</p>
        <div class="actions">
          <a class="button" href=${jobHref(job)} onClick=${() => lightbox.set(null)}>Open job</a>
          <${Copy} text=${String(artifact.seed)} label="Copy seed">Seed<//>
          <${Button} icon="download" action=${() => download(job, artifact)}>Save<//>
        </div>
      </div>
    <//>
  `;
}

/** The size of a mesh. */
export const meshText = ({ vertices, faces }) => `${count(vertices)} vertices, ${plural(faces, "face")}`;

function turn({ images, index }, step) {
  lightbox.set({ images, index: (index + step + images.length) % images.length });
}

/** What a job looks like now: a result, a preview, or a sign of its state. */
export function Thumb({ job, previews = [], size = "" }) {
  const artifact = job.artifacts?.find((one) => !isLatents(one));
  const picture = artifact && still(artifact);
  const src = picture ? local(picture) : previews.find(Boolean);
  return html`
    <span class="thumb is-${job.status} ${size}">
      ${src ? html`<img src=${src} alt="" loading="lazy" decoding="async" />` : html`<${Icon} name="image" size=${16} />`}
    </span>
  `;
}
