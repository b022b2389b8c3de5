// The same request in other clients' words.

import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { address, hasKey } from "../core/api.js";
import { makesVideo } from "../core/format.js";
import { Copy, Segments } from "./ui.js";

const OPENAI_FIELDS = ["model", "prompt", "n"];
const IMAGE_FIELDS = ["image", "images", "mask", "last_image", "video", "face_video", "audio"];

const origin = () => address("").replace(/\/$/, "");
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A value as Python writes it. */
function python(value, indent = "") {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map((one) => python(one, indent)).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value)
      .map(([name, one]) => `"${name}": ${python(one, indent)}`)
      .join(", ")}}`;
  }
  return JSON.stringify(value);
}

function curl(body) {
  const key = hasKey() ? ' \\\n  -H "Authorization: Bearer $FUSEQUEUE_API_KEY"' : "";
  return `curl -s ${origin()}/v1/jobs -H 'Prefer: wait=60' -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

function client(body) {
  const { model, prompt, ...fields } = body;
  const named = Object.entries(fields).map(([name, value]) => `, ${name}=${python(value)}`);
  const key = hasKey() ? ', api_key="fq_..."' : "";
  return `from pathlib import Path

from fusequeue import Client

with Client("${origin()}"${key}) as client:
    job = client.submit(${python(model)}${prompt === undefined ? "" : `, ${python(prompt)}`}${named.join("")})
    print(client.download(client.wait(job.id).require_success(), Path("images")))`;
}

function command(body) {
  const { model, prompt, ...fields } = body;
  const values = Object.entries(fields).map(([name, value]) => {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    return ` -s ${/^[\w.,-]+$/.test(text) ? `${name}=${text}` : quoted(`${name}=${text}`)}`;
  });
  return `fusequeue submit --model ${model}${values.join("")} -o images --url ${origin()}${prompt === undefined ? "" : ` -- ${quoted(prompt)}`}`;
}

function openai(body) {
  if (body.prompt === undefined) return `# ${body.model} makes meshes, which OpenAI's protocol does not return.`;
  if (makesVideo(body.task ?? "") || "video" in body || "frames" in body) return openaiVideo(body);
  // Priority: that of these routes is interactive. Output: their responses have the images.
  const { output: _, ...fields } = { priority: "standard", ...body };
  const images = (fields.images ?? []).map((_, index) => opened(`input-${index + 1}`));
  const extra = Object.entries(fields).filter(([name]) => ![...OPENAI_FIELDS, ...IMAGE_FIELDS].includes(name));
  const lines = [
    ...OPENAI_FIELDS.filter((name) => name in fields).map((name) => `${name}=${python(fields[name])}`),
    ...("image" in fields ? [`image=${opened("input")}`] : []),
    ...(images.length ? [`image=[${images.join(", ")}]`] : []),
    ...("mask" in fields ? [`mask=${opened("mask")}`] : []),
    `extra_body=${python(Object.fromEntries(extra))}`,
  ];
  const call = `client.images.${IMAGE_FIELDS.some((name) => name in fields) ? "edit" : "generate"}`;
  return `${openaiClient()}response = ${call}(\n    ${lines.join(",\n    ")},\n)
for number, image in enumerate(response.data, 1):
    Path(f"result-{number}.${body.output_format ?? "png"}").write_bytes(base64.b64decode(image.b64_json))`;
}

const opened = (name) => `open("${name}.png", "rb")`;

function openaiVideo({ model, prompt, width, height, output: _, ...fields }) {
  const size = width && height ? `\n    size="${width}x${height}",` : "";
  const extra = Object.keys(fields).length ? `\n    extra_body=${python(fields)},` : "";
  return `${openaiClient()}video = client.videos.create_and_poll(
    model=${python(model)},
    prompt=${python(prompt)},${size}${extra}
)
client.videos.download_content(video.id).write_to_file("result.mp4")`;
}

const openaiClient = () => `import base64
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="${origin()}/v1", api_key="${hasKey() ? "fq_..." : "unused"}")
`;

const FORMS = { curl, python: client, cli: command, openai };
const TABS = [
  ["curl", "curl"],
  ["python", "Python"],
  ["cli", "CLI"],
  ["openai", "OpenAI"],
];

/** The equivalent calls of a request body, each to be copied; OpenAI has none for sounds. */
export function Snippets({ body, sound = false }) {
  const [form, setForm] = useState("curl");
  const text = FORMS[sound && form === "openai" ? "curl" : form](body);
  return html`
    <div class="snippets">
      <div class="snippets-bar">
        <${Segments} label="Client" value=${form} options=${TABS.filter(([name]) => !(sound && name === "openai"))} onChange=${setForm} />
        <${Copy} text=${text} label="Copy the call">Copy<//>
      </div>
      <pre tabindex="0" aria-label="The call with ${form}"><code>${text}</code></pre>
    </div>
  `;
}
