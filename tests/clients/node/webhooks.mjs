// standardwebhooks on real deliveries.

import { createServer } from "node:http";
import { Webhook, WebhookVerificationError } from "standardwebhooks";
import { assert, MODEL, PROMPT, call, main, request } from "./checks.mjs";

const port = Number(process.env.WEBHOOK_PORT);

// Returns the first delivery for which `wanted` is true.
function delivery(wanted) {
  return new Promise((resolve) => {
    const server = createServer(async (message, response) => {
      const parts = [];
      for await (const part of message) parts.push(part);
      response.writeHead(204).end();
      const content = Buffer.concat(parts).toString();
      if (!wanted(JSON.parse(content))) return;
      server.close();
      resolve({ headers: message.headers, content });
    });
    server.listen(port, "127.0.0.1");
  });
}

call("Webhook.verify", async () => {
  const url = `http://127.0.0.1:${port}/node`;
  const endpoint = await request("POST", "/v1/webhooks", { url, events: ["job.succeeded"] });
  const metadata = { order: "webhooks.mjs" };
  const waiting = delivery((event) => event.data.metadata?.order === metadata.order);
  const job = await request("POST", "/v1/jobs", { model: MODEL, prompt: PROMPT, metadata });
  const { headers, content } = await waiting;
  const event = new Webhook(endpoint.secret).verify(content, headers);
  assert.deepEqual([event.type, event.data.id], ["job.succeeded", job.id]);
  const other = new Webhook(`whsec_${Buffer.alloc(32).toString("base64")}`);
  assert.throws(() => other.verify(content, headers), WebhookVerificationError);
  assert.throws(() => new Webhook(endpoint.secret).verify(`${content} `, headers), WebhookVerificationError);
  await request("DELETE", `/v1/webhooks/${endpoint.id}`);
});

await main();
