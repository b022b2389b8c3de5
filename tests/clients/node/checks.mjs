// What the scripts of Node clients share: the service, a log of their calls, and checks of what they get.

import assert from "node:assert/strict";
import zlib from "node:zlib";

export const BASE = process.env.FUSEQUEUE_URL;
export const HTTPS_BASE = process.env.FUSEQUEUE_HTTPS_URL;
export const KEY = process.env.FUSEQUEUE_API_KEY;
export const MODEL = "demo";
export const VIDEO_MODEL = "film";
export const PROMPT = "a red circle on a blue ground, left";

const calls = [];

// Registers a call of the client: `main` runs them in this order.
export function call(name, run) {
  calls.push({ name, run });
}

// Runs all calls, prints a line of JSON about them, and exits with 1 if one has failed.
export async function main() {
  const rows = [];
  for (const { name, run } of calls) {
    const started = performance.now();
    let error = null;
    try {
      await run();
    } catch (caught) {
      console.error(caught);
      error = `${caught?.name}: ${caught?.message}`.slice(0, 1000);
    }
    rows.push({ call: name, seconds: Math.round(performance.now() - started) / 1000, error });
  }
  process.stdout.write(`${JSON.stringify({ calls: rows })}\n`, () => process.exit(rows.some((row) => row.error) ? 1 : 0));
}

// Sends a request of the native API and returns its JSON.
export async function request(method, path, body) {
  const headers = { Authorization: `Bearer ${KEY}`, "Content-Type": "application/json" };
  const response = await fetch(BASE + path, { method, headers, body: body && JSON.stringify(body) });
  const text = await response.text();
  assert.ok(response.ok, `${response.status} ${text}`);
  return text ? JSON.parse(text) : null;
}

// Checks that a PNG has this size, and that its pixels can be decompressed.
export function checkPng(data, width = 64, height = 64) {
  const file = Buffer.from(data);
  assert.equal(file.subarray(0, 8).toString("latin1"), "\x89PNG\r\n\x1a\n");
  assert.deepEqual([file.readUInt32BE(16), file.readUInt32BE(20)], [width, height]);
  const parts = [];
  for (let at = 8; at < file.length; at += 12 + file.readUInt32BE(at)) {
    if (file.subarray(at + 4, at + 8).toString() === "IDAT") parts.push(file.subarray(at + 8, at + 8 + file.readUInt32BE(at)));
  }
  assert.ok(zlib.inflateSync(Buffer.concat(parts)).length > width * height);
  return file;
}

// Checks that data begin as an MP4 and have more than its index.
export function checkVideo(data) {
  const file = Buffer.from(data);
  assert.equal(file.subarray(4, 8).toString(), "ftyp");
  assert.ok(file.includes("moov") && file.includes("mdat"));
}

// Checks that `run` is rejected with an error that `check` accepts.
export async function refused(run, check) {
  let error = null;
  try {
    await run();
  } catch (caught) {
    error = caught;
  }
  assert.ok(error, "no error");
  check(error);
}

export { assert };
