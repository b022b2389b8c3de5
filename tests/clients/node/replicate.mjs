// Replicate's client for JavaScript.

import Replicate from "replicate";
import { assert, BASE, HTTPS_BASE, KEY, MODEL, PROMPT, VIDEO_MODEL, call, checkPng, checkVideo, main, refused } from "./checks.mjs";

const replicate = new Replicate({ auth: KEY, baseUrl: `${BASE}/compat/replicate/v1` });
const name = `fusequeue/${MODEL}`;
let png; // of the first call, an input of later ones

// Returns the bytes of an output: a FileOutput, or a URL.
async function read(output) {
  const blob = typeof output?.blob === "function" ? await output.blob() : await (await fetch(output)).blob();
  return Buffer.from(await blob.arrayBuffer());
}

call("run: images, a video", async () => {
  const outputs = await replicate.run(name, { input: { prompt: PROMPT, num_inference_steps: 8, num_outputs: 2 } });
  assert.equal(outputs.length, 2);
  [png] = await Promise.all(outputs.map(async (output) => checkPng(await read(output))));
  checkVideo(await read(await replicate.run(`fusequeue/${VIDEO_MODEL}`, { input: { prompt: "a wave" } })));
});

call("run over https: outputs are URLs", async () => {
  const secure = new Replicate({ auth: KEY, baseUrl: `${HTTPS_BASE}/compat/replicate/v1` });
  const image = new Blob([png], { type: "image/png" });
  const [output] = await secure.run(name, { input: { prompt: PROMPT, image } });
  assert.ok(output.url().href.startsWith(HTTPS_BASE));
  checkPng(await read(output));
});

call("run with progress, a file that is uploaded", async () => {
  const states = [];
  const image = new Blob([png], { type: "image/png" });
  const input = { prompt: PROMPT, image, prompt_strength: 0.7 };
  const [output] = await replicate.run(name, { input, wait: { mode: "poll", interval: 50 } }, (prediction) => states.push(prediction.status));
  assert.equal(states.at(-1), "succeeded");
  checkPng(await read(output));
});

call("predictions.create, wait, get, list", async () => {
  const made = await replicate.predictions.create({ model: name, input: { prompt: PROMPT } });
  const ended = await replicate.wait(made, { interval: 50 });
  assert.deepEqual([ended.status, ended.error], ["succeeded", null]);
  checkPng(await read(ended.output[0]));
  assert.equal((await replicate.predictions.get(made.id)).status, "succeeded");
  const ids = [];
  for await (const page of replicate.paginate(replicate.predictions.list)) ids.push(...page.map((entry) => entry.id));
  assert.ok(ids.includes(made.id));
});

call("predictions.cancel", async () => {
  const input = { prompt: PROMPT, num_inference_steps: 100, num_outputs: 8 };
  const made = await replicate.predictions.create({ version: MODEL, input });
  await replicate.predictions.cancel(made.id);
  const ended = await replicate.wait(made, { interval: 50 });
  assert.equal(ended.status, "canceled");
});

call("stream", async () => {
  const events = [];
  for await (const event of replicate.stream(name, { input: { prompt: PROMPT, num_inference_steps: 40 } })) events.push(event);
  assert.equal(events.at(-1).event, "done");
  const output = events.find((event) => event.event === "output");
  checkPng(await read(output.data));
});

call("files.create, get, delete; a file as input", async () => {
  const file = await replicate.files.create(png, { order: 12 });
  assert.equal((await replicate.files.get(file.id)).content_type, "image/png");
  const [output] = await replicate.run(name, { input: { prompt: PROMPT, image: file.urls.get } });
  checkPng(await read(output));
  await replicate.files.delete(file.id);
  await refused(() => replicate.files.get(file.id), (error) => assert.equal(error.response.status, 404));
});

call("models.get; errors: ApiError", async () => {
  assert.equal((await replicate.models.get("fusequeue", MODEL)).name, MODEL);
  await refused(
    () => replicate.run(name, { input: { prompt: PROMPT, stepz: 3 } }),
    (error) => {
      assert.equal(error.response.status, 422);
      assert.match(error.message, /stepz/);
    },
  );
});

await main();
