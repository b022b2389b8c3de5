// A mask that is painted over the image of a request: white where it is repainted, black elsewhere.

import { html, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { Dialog } from "./dialogs.js";
import { Shown, upload } from "./drop.js";
import { Range } from "./fields.js";
import { Button, Segments } from "./ui.js";

const TOOLS = [
  ["paint", "Paint"],
  ["erase", "Erase"],
];

/** A button that opens the painting of a mask for `image`; `onPainted` gets the uploaded mask. */
export function PaintMask({ image, onPainted }) {
  const [open, setOpen] = useState(false);
  return html`
    <${Button} icon="edit" action=${() => setOpen(true)}>Paint a mask<//>
    ${open && html`<${Painter} image=${image} onPainted=${onPainted} onClose=${() => setOpen(false)} />`}
  `;
}

function Painter({ image, onPainted, onClose }) {
  const canvas = useRef(null);
  const last = useRef(null);
  const [size, setSize] = useState(null);
  const [brush, setBrush] = useState(15);
  const [tool, setTool] = useState("paint");
  const [painted, setPainted] = useState(false);
  const loaded = ({ target }) => setSize({ width: target.naturalWidth, height: target.naturalHeight });
  const stroke = (event) => {
    if (!(event.buttons & 1)) return;
    const { left, top, width } = canvas.current.getBoundingClientRect();
    const scale = size.width / width;
    const here = [(event.clientX - left) * scale, (event.clientY - top) * scale];
    const context = canvas.current.getContext("2d");
    context.globalCompositeOperation = tool === "erase" ? "destination-out" : "source-over";
    context.strokeStyle = "#fff";
    context.lineCap = "round";
    context.lineWidth = Math.max(1, (brush / 100) * Math.min(size.width, size.height));
    context.beginPath();
    context.moveTo(...(last.current ?? here));
    context.lineTo(...here);
    context.stroke();
    last.current = here;
    if (tool === "paint") setPainted(true);
  };
  const begin = (event) => {
    canvas.current.setPointerCapture(event.pointerId); // a stroke goes on outside
    last.current = null;
    stroke(event);
  };
  const clear = () => {
    canvas.current.getContext("2d").clearRect(0, 0, size.width, size.height);
    setPainted(false);
  };
  const isOpen = useRef(true);
  const close = () => {
    isOpen.current = false; // an upload in progress ends without effect
    onClose();
  };
  const use = async () => {
    const mask = await upload(await maskFile(canvas.current));
    if (isOpen.current) onPainted(mask);
    close();
  };
  return html`
    <${Dialog} title="Paint what is repainted" kind="painter" onClose=${close}>
      <div class="painting" style=${size && { width: `min(100%, ${(60 * size.width) / size.height}vh)` }}>
        <${Shown} image=${image} onLoad=${loaded} />
        ${
          size &&
          html`<canvas ref=${canvas} width=${size.width} height=${size.height} aria-label="Mask" role="img" onPointerDown=${begin} onPointerMove=${stroke}></canvas>`
        }
      </div>
      <div class="painter-tools">
        <${Segments} label="Tool" value=${tool} options=${TOOLS} onChange=${setTool} />
        <${Range} label="Brush, percent of the image" value=${brush} min=${1} max=${100} step=${1} onChange=${setBrush} />
      </div>
      <footer>
        <${Button} kind="quiet" disabled=${!painted} action=${clear}>Clear<//>
        <${Button} kind="primary" icon="check" disabled=${!painted} action=${use}>Use the mask<//>
      </footer>
    <//>
  `;
}

/** A PNG file of the strokes on a black ground. */
async function maskFile(strokes) {
  const mask = Object.assign(document.createElement("canvas"), { width: strokes.width, height: strokes.height });
  const context = mask.getContext("2d");
  context.fillStyle = "#000";
  context.fillRect(0, 0, mask.width, mask.height);
  context.drawImage(strokes, 0, 0);
  const blob = await new Promise((resolve) => mask.toBlob(resolve, "image/png"));
  if (!blob) throw new Error("The image is too large to paint on: upload a mask.");
  return new File([blob], "mask.png", { type: "image/png" });
}
