// eventsource, as browsers have it, on the events of a job: it sends no key.

import { EventSource } from "eventsource";
import { assert, MODEL, PROMPT, call, main, request } from "./checks.mjs";

// Returns the events of a job until its last one.
function events(url) {
  return new Promise((resolve, reject) => {
    const source = new EventSource(url);
    const found = [];
    for (const type of ["state", "progress"]) {
      source.addEventListener(type, (event) => {
        const data = JSON.parse(event.data);
        found.push({ type, data });
        if (data.status === "succeeded") {
          source.close();
          resolve(found);
        }
      });
    }
    source.onerror = (event) => reject(new Error(`${event.code} ${event.message}`));
  });
}

call("EventSource with a signed URL", async () => {
  const job = await request("POST", "/v1/jobs", { model: MODEL, prompt: PROMPT, steps: 40 });
  const found = await events(job.urls.events);
  assert.equal(found.at(-1).data.id, job.id);
  assert.equal(found.at(-1).data.artifacts.length, 1);
  const steps = found.filter((event) => event.type === "progress").map((event) => event.data.progress.step);
  assert.deepEqual(steps, [...steps].sort((a, b) => a - b));
});

call("EventSource without a signature: refused", async () => {
  const job = await request("POST", "/v1/jobs", { model: MODEL, prompt: PROMPT });
  await assert.rejects(events(job.urls.events.split("?")[0]), /401/);
});

await main();
