// fal's client for JavaScript.

import { createFalClient } from "@fal-ai/client";
import { assert, BASE, KEY, MODEL, PROMPT, VIDEO_MODEL, call, checkPng, checkVideo, main, refused } from "./checks.mjs";

const app = `fusequeue/${MODEL}`;
const fal = createFalClient({
  credentials: KEY,
  requestMiddleware: async (request) => ({
    ...request,
    url: request.url.replace(/^https:\/\/(queue\.fal\.run|rest\.fal\.ai)/, `${BASE}/compat/fal`),
  }),
});
let png; // of the first call, an input of a later one

const download = async (file) => Buffer.from(await (await fetch(file.url)).arrayBuffer());

call("subscribe with logs: polling and streaming", async () => {
  for (const mode of ["polling", "streaming"]) {
    const updates = [];
    const input = { prompt: PROMPT, seed: 7, num_inference_steps: 40 };
    const onQueueUpdate = (update) => updates.push(update);
    const { data } = await fal.subscribe(app, { input, logs: true, mode, pollInterval: 50, onQueueUpdate });
    assert.equal(updates.at(-1).status, "COMPLETED");
    assert.ok(updates.at(-1).logs.some((line) => line.message.includes("seed")));
    png = checkPng(await download(data.images[0]));
  }
});

call("an image that is uploaded; a video", async () => {
  const url = await fal.storage.upload(new Blob([png], { type: "image/png" }));
  assert.match(url, /\/compat\/fal\/storage\/files\/in_/);
  const image_url = new Blob([png], { type: "image/png" });
  const edited = await fal.subscribe(app, { input: { prompt: PROMPT, image_url, strength: 0.7 }, pollInterval: 50 });
  checkPng(await download(edited.data.images[0]));
  const film = await fal.subscribe(`fusequeue/${VIDEO_MODEL}`, { input: { prompt: "a wave" }, pollInterval: 50 });
  checkVideo(await download(film.data.video));
});

call("queue.submit, status, result, cancel", async () => {
  const { request_id: requestId } = await fal.queue.submit(app, { input: { prompt: PROMPT } });
  await fal.queue.subscribeToStatus(app, { requestId, pollInterval: 50 });
  assert.equal((await fal.queue.status(app, { requestId, logs: true })).status, "COMPLETED");
  checkPng(await download((await fal.queue.result(app, { requestId })).data.images[0]));
  const slow = { prompt: PROMPT, num_inference_steps: 100, num_images: 8 };
  const canceled = await fal.queue.submit(app, { input: slow, priority: "low" });
  await fal.queue.cancel(app, { requestId: canceled.request_id });
  await fal.queue.subscribeToStatus(app, { requestId: canceled.request_id, pollInterval: 50 });
  await refused(
    () => fal.queue.result(app, { requestId: canceled.request_id }),
    (error) => assert.match(JSON.stringify(error.body), /cancel/),
  );
});

call("errors: ValidationError, ApiError", async () => {
  await refused(
    () => fal.queue.submit(app, { input: { prompt: PROMPT, num_inference_steps: 1000 } }),
    (error) => {
      assert.deepEqual([error.name, error.status], ["ValidationError", 422]);
      assert.equal(error.getFieldErrors("num_inference_steps").length, 1);
    },
  );
  await refused(
    () => fal.queue.submit("fal-ai/sdxl", { input: { prompt: PROMPT } }),
    (error) => assert.deepEqual([error.name, error.status], ["ApiError", 404]),
  );
});

await main();
