// Sounds of jobs: a player with the waveform above it.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { local } from "../core/api.js";

export const isSound = (artifact) => artifact.kind === "audio";

/** A finished sound; the waveform moves to a place of it. */
export function SoundView({ job, artifact, size = "" }) {
  const [missing, setMissing] = useState(null);
  const [played, setPlayed] = useState(0);
  const src = local(artifact.url);
  if (missing === src) {
    const where = artifact.location ? `at ${artifact.location}` : "no longer kept";
    return html`<div class="sound ${size}"><span class="missing">${where}</span></div>`;
  }
  const moved = ({ target }) => setPlayed(target.duration ? target.currentTime / target.duration : 0);
  const seek = (event) => {
    const player = event.currentTarget.parentElement.querySelector("audio");
    const { left, width } = event.currentTarget.getBoundingClientRect();
    if (player.duration) player.currentTime = (player.duration * (event.clientX - left)) / width;
  };
  return html`
    <div class="sound ${size}">
      ${
        artifact.thumbnail_url &&
        html`<div class="wave" onClick=${seek} style=${{ "--played": played }}>
        <img src=${local(artifact.thumbnail_url)} alt="Waveform: ${job.prompt.slice(0, 120)}" loading="lazy" decoding="async" /></div>`
      }
      <audio controls preload="metadata" src=${src} aria-label="Play: ${job.prompt.slice(0, 120)}" onTimeUpdate=${moved} onError=${() => setMissing(src)}></audio>
      ${artifact.flagged && html`<span class="tag">flagged</span>`}
    </div>
  `;
}
