// Icons as strokes of a 20 by 20 grid. They are beside a text, or in a button with a label: screen readers skip them.

import { html } from "../vendor/htm-preact-3.1.1.js";

const PATHS = {
  now: "M2.5 10.5h3.2l2.2-6 4 11 2.3-5h3.3",
  playground:
    "M10 2.5l1.7 4.6 4.6 1.7-4.6 1.7L10 15.1l-1.7-4.6-4.6-1.7 4.6-1.7z M15.5 13.5l.8 2 2 .8-2 .8-.8 2-.8-2-2-.8 2-.8z",
  jobs: "M3 5h14M3 10h14M3 15h9",
  groups: "M2.5 16V4.5h5l1.8 2.2h8.2V16z",
  batches: "M10 2.8l7 3.6-7 3.6-7-3.6z M3 10l7 3.6 7-3.6 M3 13.6l7 3.6 7-3.6",
  dead: "M10 3l7.5 13.5h-15z M10 8.3v3.7 M10 14.3v.1",
  models: "M10 2.5l6.5 3.7v7.6L10 17.5l-6.5-3.7V6.2z M3.5 6.2L10 10l6.5-3.8 M10 10v7.5",
  key: "M12.5 11a4 4 0 1 0-3.3-1.7L3 15.5V17h2.5v-1.8h1.8v-1.8h1.7l1.5-1.6 M13.5 6.5v.1",
  leave: "M12 4.5V3H4v14h8v-1.5 M8.5 10h8.5 M14 6.8l3.2 3.2-3.2 3.2",
  help: "M7.5 7.6a2.5 2.5 0 1 1 3.7 2.2c-.8.5-1.2.9-1.2 1.9 M10 14.4v.1 M10 17.5a7.5 7.5 0 1 0 0-15 7.5 7.5 0 0 0 0 15z",
  docs: "M4.5 3.5h7l4 4v9h-11z M11.5 3.5v4h4 M7 11h6 M7 13.8h4",
  tenants: "M7.5 9.5a3 3 0 1 0 0-6 3 3 0 0 0 0 6z M2.5 16.5a5 5 0 0 1 10 0 M12.5 3.8a3 3 0 0 1 0 5.4 M14 12a5 5 0 0 1 3.5 4.5",
  actions: "M4.5 3.5h11v13h-11z M7.5 7h5 M7.5 10h5 M7.5 13h3",
  pause: "M7 4.5v11 M13 4.5v11",
  resume: "M6.5 4l9 6-9 6z",
  close: "M5 5l10 10M15 5L5 15",
  copy: "M7.5 7.5h8.5v8.5H7.5z M4 12.5V4h8.5",
  check: "M4 10.5l4 4 8-9",
  cancel: "M10 17.5a7.5 7.5 0 1 0 0-15 7.5 7.5 0 0 0 0 15z M7.3 7.3l5.4 5.4 M12.7 7.3l-5.4 5.4",
  trash: "M4 5.5h12 M8 5.5V3.5h4v2 M5.5 5.5l.8 11h7.4l.8-11 M8.5 8.5v5 M11.5 8.5v5",
  redo: "M15.5 8A6 6 0 1 0 16 11.5 M16 4v4.2h-4.2",
  edit: "M4 16l.8-3.4L13.3 4l2.7 2.7-8.6 8.5z M11.5 5.8l2.7 2.7",
  dice: "M4 4h12v12H4z M7.3 7.3v.1 M12.7 7.3v.1 M10 10v.1 M7.3 12.7v.1 M12.7 12.7v.1",
  download: "M10 3v9 M6.3 8.7L10 12.4l3.7-3.7 M4 16.5h12",
  upload: "M10 13V4 M6.3 7.3L10 3.6l3.7 3.7 M4 16.5h12",
  image: "M3 4h14v12H3z M3 13.5l4-4 3.5 3.5 2-2 4.5 4 M13 7.7v.1",
  left: "M12.5 4.5L7 10l5.5 5.5",
  right: "M7.5 4.5L13 10l-5.5 5.5",
  table: "M3 4h14v12H3z M3 8h14 M3 12h14 M8 8v8",
  gallery: "M3 3h6v6H3z M11 3h6v6h-6z M3 11h6v6H3z M11 11h6v6h-6z",
  filter: "M3 5h14l-5.5 6.5V16l-3 1v-5.5z",
  send: "M3.5 10h11 M10 5l5 5-5 5",
  worker: "M4 4h12v12H4z M7.5 7.5h5v5h-5z M7 4V2 M13 4V2 M7 18v-2 M13 18v-2 M2 7h2 M2 13h2 M16 7h2 M16 13h2",
};

export const Icon = ({ name, size = 18 }) => html`
  <svg class="icon" width=${size} height=${size} viewBox="0 0 20 20" aria-hidden="true" focusable="false">
    <path d=${PATHS[name]} />
  </svg>
`;

export const Mark = ({ size = 26 }) => html`
  <svg class="mark" width=${size} height=${size} viewBox="0 0 32 32" aria-hidden="true" focusable="false">
    <rect width="32" height="32" rx="8" class="mark-ground" />
    <path d="M7 9h5c5 0 3.5 7 9 7h4 M7 16h18 M7 23h5c5 0 3.5-7 9-7" class="mark-lines" />
  </svg>
`;
