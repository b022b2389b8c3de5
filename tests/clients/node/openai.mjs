// The OpenAI SDK for Node: images, edits, videos, files, batches, models.

import OpenAI, { toFile } from "openai";
import { setTimeout as sleep } from "node:timers/promises";
import { assert, BASE, KEY, MODEL, PROMPT, VIDEO_MODEL, call, checkPng, checkVideo, main, refused } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const endpoint = "/v1/images/generations";
const decoded = (entry) => Buffer.from(entry.b64_json, "base64");
let png; // of the first call, edited by a later one

async function listed(pages) {
  const ids = [];
  for await (const entry of pages) ids.push(entry.id);
  return ids;
}

call("models.list, models.retrieve", async () => {
  assert.deepEqual((await listed(client.models.list())).sort(), [MODEL, VIDEO_MODEL]);
  assert.equal((await client.models.retrieve(MODEL)).object, "model");
});

call("images.generate: base64, `n`, fields of the service", async () => {
  const response = await client.images.generate({ model: MODEL, prompt: PROMPT, n: 2, size: "64x64", seed: 7, steps: 4 });
  assert.deepEqual(response.data.map((entry) => entry.seed), [7, 8]);
  [png] = response.data.map((entry) => checkPng(decoded(entry)));
});

call("images.generate: url, webp", async () => {
  const response = await client.images.generate({ model: MODEL, prompt: PROMPT, response_format: "url", output_format: "webp" });
  const download = await fetch(response.data[0].url); // without the key
  assert.equal(download.headers.get("content-type"), "image/webp");
  assert.equal(Buffer.from(await download.arrayBuffer()).subarray(8, 12).toString(), "WEBP");
});

call("images.generate: stream with partial images", async () => {
  const stream = await client.images.generate({ model: MODEL, prompt: PROMPT, stream: true, partial_images: 2, steps: 40 });
  const events = [];
  for await (const event of stream) events.push(event);
  assert.deepEqual(
    events.map((event) => event.type.split(".")[1]),
    ["partial_image", "partial_image", "completed"],
  );
  checkPng(decoded(events[2]));
});

call("images.edit: one image, a mask", async () => {
  const image = () => toFile(png, "a.png", { type: "image/png" });
  const edited = await client.images.edit({ model: MODEL, prompt: PROMPT, image: await image(), strength: 0.7 });
  checkPng(decoded(edited.data[0]));
  const painted = await client.images.edit({ model: MODEL, prompt: PROMPT, image: await image(), mask: await image() });
  checkPng(decoded(painted.data[0]));
});

call("videos.create, retrieve, downloadContent, list, delete", async () => {
  let video = await client.videos.create({ model: VIDEO_MODEL, prompt: "a wave", seconds: "1" });
  while (["queued", "in_progress"].includes(video.status)) {
    await sleep(200);
    video = await client.videos.retrieve(video.id);
  }
  assert.deepEqual([video.status, video.progress, video.size], ["completed", 100, "64x64"]);
  checkVideo(await (await client.videos.downloadContent(video.id)).arrayBuffer());
  assert.ok((await listed(client.videos.list({ limit: 1 }))).includes(video.id));
  assert.ok((await client.videos.delete(video.id)).deleted);
  await refused(() => client.videos.retrieve(video.id), (error) => assert.ok(error instanceof OpenAI.NotFoundError));
});

call("files.create, list, retrieve, content, delete", async () => {
  const content = '{"custom_id": "1"}\n';
  const file = await client.files.create({ file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
  assert.deepEqual([file.purpose, file.bytes], ["batch", content.length]);
  assert.ok((await listed(client.files.list({ purpose: "batch" }))).includes(file.id));
  assert.equal((await client.files.retrieve(file.id)).filename, "in.jsonl");
  assert.equal(await (await client.files.content(file.id)).text(), content);
  assert.ok((await client.files.delete(file.id)).deleted);
});

call("batches.create, retrieve, list; results and errors of lines", async () => {
  const lines = [1000, 4, 4].map((steps, number) =>
    JSON.stringify({ custom_id: `line-${number}`, method: "POST", url: endpoint, body: { model: MODEL, prompt: PROMPT, steps } }),
  );
  const file = await client.files.create({ file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"), purpose: "batch" });
  let batch = await client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h" });
  while (["validating", "in_progress", "finalizing"].includes(batch.status)) {
    await sleep(500);
    batch = await client.batches.retrieve(batch.id);
  }
  assert.deepEqual([batch.status, batch.request_counts.completed, batch.request_counts.failed], ["completed", 2, 1]);
  const results = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
  for (const line of results) checkPng(decoded(line.response.body.data[0]));
  assert.match(await (await client.files.content(batch.error_file_id)).text(), /steps must be 1 to/);
  assert.ok((await listed(client.batches.list({ limit: 1 }))).includes(batch.id));
});

call("errors: BadRequestError with `param`, NotFoundError, AuthenticationError", async () => {
  const send = (body, from = client) => () => from.images.generate({ model: MODEL, prompt: PROMPT, ...body });
  await refused(send({ stepz: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "stepz");
  });
  await refused(send({ model: "sdxl" }), (error) => assert.ok(error instanceof OpenAI.NotFoundError));
  const stranger = client.withOptions({ apiKey: "fq_wrong" });
  await refused(send({}, stranger), (error) => assert.ok(error instanceof OpenAI.AuthenticationError));
});

await main();
