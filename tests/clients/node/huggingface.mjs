// Hugging Face's client for JavaScript.

import { InferenceClient } from "@huggingface/inference";
import { assert, BASE, KEY, MODEL, PROMPT, VIDEO_MODEL, call, checkPng, main, refused } from "./checks.mjs";

const base = `${BASE}/compat/huggingface`;
const client = new InferenceClient(KEY).endpoint(`${base}/${MODEL}`);
let png; // of the first call, edited by a later one

call("textToImage", async () => {
  const parameters = { num_inference_steps: 8, guidance_scale: 2, seed: 7, width: 128, height: 64 };
  const image = await client.textToImage({ inputs: PROMPT, parameters }, { outputType: "blob" });
  png = checkPng(await image.arrayBuffer(), 128, 64);
});

call("imageToImage", async () => {
  const inputs = new Blob([png], { type: "image/png" });
  const image = await client.imageToImage({ inputs, parameters: { prompt: PROMPT, strength: 0.7 } });
  checkPng(await image.arrayBuffer(), 128, 64); // an image that is changed keeps its size
});

call("errors: a sentence, also for a model of videos", async () => {
  const send = (parameters, model = MODEL) => () =>
    new InferenceClient(KEY).endpoint(`${base}/${model}`).textToImage({ inputs: PROMPT, parameters }, { outputType: "blob" });
  const says = (status, pattern) => (error) => {
    assert.equal(error.httpResponse?.status, status);
    assert.match(JSON.stringify(error.httpResponse.body) + error.message, pattern);
  };
  await refused(send({ width: 65 }), says(422, /width must be a multiple of 8, not 65/));
  await refused(send({}, "sdxl"), says(404, /sdxl/));
  await refused(send({}, VIDEO_MODEL), says(422, /video/));
});

await main();
