"""standardwebhooks on real deliveries."""

from __future__ import annotations

import base64
import json
import os
import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import checks
import openai
from checks import KEY, MODEL, PROMPT, URL, call, refused, request, same
from standardwebhooks import Webhook, WebhookVerificationError

PORT = int(os.environ["WEBHOOK_PORT"])
received: queue.Queue[tuple[dict[str, str], str]] = queue.Queue()


class Receiver(BaseHTTPRequestHandler):
    """Queues each delivery."""

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"])).decode()
        received.put(({name.lower(): value for name, value in self.headers.items()}, content))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@call("Webhook.verify; openai.webhooks.unwrap")
def verify() -> None:
    hook = f"http://127.0.0.1:{PORT}/python"
    endpoint = request("POST", "/v1/webhooks", {"url": hook, "events": ["job.succeeded"]})
    job = request("POST", "/v1/jobs", {"model": MODEL, "prompt": PROMPT})
    headers, content = received.get(timeout=60)
    while json.loads(content)["data"]["id"] != job["id"]:
        headers, content = received.get(timeout=60)
    event = Webhook(endpoint["secret"]).verify(content, headers)
    same((event["type"], event["data"]["id"]), ("job.succeeded", job["id"]))
    with openai.OpenAI(base_url=URL, api_key=KEY) as client:
        same(client.webhooks.unwrap(content, headers, secret=endpoint["secret"]).type, "job.succeeded")
    with refused(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(bytes(32)).decode()).verify(content, headers)
    with refused(WebhookVerificationError):
        Webhook(endpoint["secret"]).verify(content + " ", headers)
    request("DELETE", f"/v1/webhooks/{endpoint['id']}")


threading.Thread(target=HTTPServer(("127.0.0.1", PORT), Receiver).serve_forever, daemon=True).start()
checks.main()
