"""The page at `/` (its files, its session, jobs with previews, the stream of several jobs), and that at `/docs`."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import httpx
import pytest
from harness.http_server import BODY, ROOT, WORKER, StreamingCall, bearer, deliver, next_claim, serving
from harness.tables import row

from api import auth
from api.page.session import SAME_FIELDS
from shared.auth import Scope
from shared.job import Phase
from shared.job_record import Progress
from shared.queue import ProgressReport, Queue, WorkerInfo

STATIC = ROOT / "api/page/static"
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
OWN_SCRIPTS = [name for name in FILES if name.endswith(".js") and not name.startswith("vendor/")]


async def folder_of(api: httpx.AsyncClient) -> str:
    """Return where the document says that its files are."""
    found = re.search(r'src="(page/[0-9a-f]+)/app\.js"', (await api.get("/")).text)
    assert found is not None
    return found[1]


async def test_the_document_allows_only_its_own_files_and_no_inline_code(api: httpx.AsyncClient) -> None:
    response = await api.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    html = response.text
    assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|https?://", html) == []
    assert "{" not in html, "a placeholder is left"


async def test_the_document_is_revalidated_and_its_files_are_kept(api: httpx.AsyncClient) -> None:
    response = await api.get("/")
    again = await api.get("/", headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert response.headers["cache-control"] == "no-cache"
    script = await api.get(f"/{await folder_of(api)}/app.js")
    assert "immutable" in script.headers["cache-control"]
    whole = {"Accept-Encoding": "identity"}
    assert (await api.head("/", headers=whole)).headers["content-length"] == str(len(response.content))


SERVED = [name for name in FILES if name != "index.html"]


async def test_every_file_is_served_with_its_type_also_compressed(api: httpx.AsyncClient) -> None:
    folder = await folder_of(api)
    for name in SERVED:
        with row(name):
            url = f"/{folder}/{name}"
            plain = await api.get(url, headers={"Accept-Encoding": "identity"})
            assert plain.content == (STATIC / name).read_bytes()
            types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
            assert plain.headers["content-type"].partition(";")[0] == types[name.rpartition(".")[2]]
            async with api.stream("GET", url, headers={"Accept-Encoding": "gzip"}) as compressed:
                assert compressed.headers["content-encoding"] == "gzip"
                raw = b"".join([piece async for piece in compressed.aiter_raw()])
            assert gzip.decompress(raw) == plain.content


NOT_SERVED = ["app.js/", "index.html", "../app.js", "nothing.js", "core", "%2e%2e/assets.py"]


async def test_nothing_else_is_served(api: httpx.AsyncClient) -> None:
    folder = await folder_of(api)
    for name in NOT_SERVED:
        with row(name):
            response = await api.get(f"/{folder}/{name}")
            assert response.status_code == 404
            assert response.headers["content-type"] == "application/problem+json"


async def test_a_file_of_another_version_is_not_served(api: httpx.AsyncClient) -> None:
    response = await api.get("/page/0123456789abcdef/app.js")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert "load the page again" in response.json()["detail"]


def test_every_import_is_a_file_that_exports_the_name_and_no_script_evaluates_text() -> None:
    """No build step would notice it otherwise."""
    for name in OWN_SCRIPTS:
        with row(name):
            text = (STATIC / name).read_text("utf-8")
            for names, source in re.findall(r'^import (?:\{([^}]*)\} from )?"([^"]+)";', text, re.MULTILINE):
                imported = (STATIC / name).parent / source
                assert imported.is_file(), source
                exported = imported.read_text("utf-8")
                for one in filter(None, (part.strip() for part in names.split(","))):
                    own = rf"^export (async )?(function\*?|const|class|let) {re.escape(one)}\b"
                    bundled = rf"[{{,]\s*(\w+ as )?{re.escape(one)}\s*[,}}]"
                    assert re.search(f"{own}|{bundled}", exported, re.MULTILINE), f"{source}: {one}"
            assert re.findall(r"\beval\(|new Function|innerHTML|InnerHTML|localStorage|sessionStorage", text) == []
            assert re.findall(r"""["'`](?:https?:)?//""", text) == [], "an external resource"


def test_the_library_is_named_by_version_with_its_licences() -> None:
    (library,) = (name for name in FILES if name.startswith("vendor/") and name.endswith(".js"))
    version = re.search(r"htm-preact-(\d+\.\d+\.\d+)\.js", library)
    assert version is not None
    licence = (STATIC / "vendor" / "LICENSES.txt").read_text("utf-8")
    assert version[1] in licence
    assert "Apache License" in licence
    assert "The MIT License" in licence
    assert PurePosixPath(library).name in licence


async def test_the_openapi_document_has_nothing_of_the_page(api: httpx.AsyncClient) -> None:
    paths = (await api.get("/openapi.json")).json()["paths"]
    assert [path for path in paths if path == "/" or path.startswith(("/page", "/docs"))] == []


async def test_the_reference_has_its_files_from_here_and_may_call_this_service_only(api: httpx.AsyncClient) -> None:
    document = await api.get("/docs")
    policy = document.headers["content-security-policy"]
    assert policy == (await api.get("/")).headers["content-security-policy"]
    assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|https?://|{", document.text) == []
    styles, own_styles, library, script = re.findall(r'(?:href|src)="(docs/[0-9a-f]{16}/[^"]+)"', document.text)
    assert b"SwaggerUIBundle(" in (await api.get(f"/{script}")).content
    assert (await api.get(f"/{own_styles}")).headers["content-type"].startswith("text/css")
    licences = (await api.get(f"/{library.rpartition('/')[0]}/LICENSES.txt")).text
    for name, limit in ((library, 500_000), (styles, 30_000)):
        with row(name):
            whole = (await api.get(f"/{name}", headers={"Accept-Encoding": "identity"})).content
            compressed = await api.get(f"/{name}")
            assert compressed.headers["content-encoding"] == "gzip"
            assert int(compressed.headers["content-length"]) < limit
            assert compressed.content == whole
            assert hashlib.sha256(whole).hexdigest() in licences
    assert (await api.get("/docs/0123456789abcdef/docs.js")).status_code == 404


async def test_references_of_the_description_are_to_its_components(api: httpx.AsyncClient) -> None:
    """`/docs` resolves no others."""
    document = (await api.get("/openapi.json")).json()
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert references
    for reference in references:
        first, components, kind, name = reference.split("/")
        assert (first, components) == ("#", "components")
        assert name in document["components"][kind]


async def test_the_session_says_what_a_key_may_do(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        without = await api.get("/page/session")
        reader = await api.get("/page/session", headers=await bearer(fake_queue, "acme", (Scope.JOBS_READ,)))
        metrics = await api.get("/page/session", headers=await bearer(fake_queue, "ops", (Scope.METRICS,)))
    assert without.status_code == 401
    expected = {
        "has_key": True,
        "tenant": "acme",
        "scopes": ["jobs:read"],
        "namespace": fake_queue.client.settings.namespace,
        "max_input_bytes": fake_queue.client.settings.max_input_bytes,
        "same_fields": SAME_FIELDS,
    }
    assert reader.json() == expected
    assert metrics.json()["scopes"] == ["metrics"]


async def test_without_keys_everything_is_allowed(api: httpx.AsyncClient) -> None:
    session = (await api.get("/page/session")).json()
    assert (session["has_key"], session["scopes"]) == (False, sorted(Scope))


async def test_a_job_of_the_page_has_previews_and_is_else_the_same(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    body = {**BODY, "seed": 7}
    with_previews = (await api.post("/page/jobs", json=body)).json()
    without = (await api.post("/v1/jobs", json=body)).json()
    own = {"id", "created_at", "urls", "queue"}
    assert {name: value for name, value in with_previews.items() if name not in own} == {
        name: value for name, value in without.items() if name not in own
    }
    record = await fake_queue.jobs.get(with_previews["id"])
    assert record is not None
    assert record.job.previews > 0
    assert (await api.post("/page/jobs", json={**BODY, "steps": 0})).status_code == 422


async def test_a_submission_that_is_repeated_is_one_job(api: httpx.AsyncClient) -> None:
    ids = {(await api.post("/page/jobs", json=BODY, headers={"Idempotency-Key": "k"})).json()["id"] for _ in range(2)}
    assert len(ids) == 1


async def test_a_reader_cannot_submit_through_the_page(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        response = await api.post("/page/jobs", json=BODY, headers=await bearer(fake_queue, "a", (Scope.JOBS_READ,)))
    assert (response.status_code, response.json()["code"]) == (403, "permission_denied")


async def test_a_page_of_another_origin_cannot_submit_without_a_key(api: httpx.AsyncClient) -> None:
    response = await api.post("/page/jobs", json=BODY, headers={"Origin": "https://evil.example"})
    assert (response.status_code, response.json()["code"]) == (403, "origin_not_allowed")


def events(text: str) -> list[tuple[str, dict[str, object]]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    fields = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(one["event"], json.loads(one["data"])) for one in fields]


async def test_one_stream_follows_several_jobs_with_previews_to_their_end(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    first, second = [(await api.post("/page/jobs", json=BODY)).json()["id"] for _ in range(2)]
    reader = StreamingCall(api, f"/page/live?jobs={first},{second},job_gone")
    await reader.wait_for(f'"id":"{second}","status":"queued"')
    claims = {claim.job.id: claim for claim in await fake_queue.claims.claim(WORKER, ["demo"], 2)}
    claim = claims[first]
    await reader.wait_for(f'"id":"{first}","status":"running"')
    await fake_queue.previews.put(first, claim.epoch, 0, 1, b"image")
    while "event: preview" not in reader.text:  # progress is not stored, so it is reported until received
        report = ProgressReport(first, claim.epoch, Phase.DENOISING, Progress(step=6, total=12))
        await fake_queue.claims.report_progress(report)
        await asyncio.sleep(0.02)
    for one in claims.values():
        await deliver(fake_queue, tmp_path, one)
    seen = events(await reader.read_all())
    assert ("gone", {"id": "job_gone"}) in seen
    (preview,) = [data for kind, data in seen if kind == "preview"]
    assert preview == {"id": first, "index": 0, "url": "data:image/png;base64,aW1hZ2U="}
    running = [data for kind, data in seen if kind == "job" and data["status"] == "running" and "worker" in data]
    assert {str(data["worker"]) for data in running} == {WORKER}
    ended = {str(data["id"]): data for kind, data in seen if kind == "end"}
    assert ended == {job_id: (await api.get(f"/v1/jobs/{job_id}")).json() for job_id in (first, second)}


async def test_jobs_of_another_tenant_are_gone(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        own = await bearer(fake_queue, "acme", (Scope.JOBS_READ, Scope.JOBS_WRITE))
        job_id = (await api.post("/page/jobs", json=BODY, headers=own)).json()["id"]
        other = await bearer(fake_queue, "other", (Scope.JOBS_READ,))
        response = await api.get("/page/live", params={"jobs": job_id}, headers=other)
        unread = await api.get("/page/live", params={"jobs": job_id})
    assert events(response.text) == [("gone", {"id": job_id})]
    assert unread.status_code == 401


async def test_the_graph_of_a_job_has_its_parents_and_children(api: httpx.AsyncClient) -> None:
    parent = (await api.post("/v1/jobs", json={**BODY, "prompt": "x" * 300})).json()["id"]
    child, sibling = [(await api.post("/v1/jobs", json={**BODY, "after": [parent]})).json()["id"] for _ in range(2)]
    await api.post(f"/v1/jobs/{child}/cancel")
    graph = (await api.get("/page/graph", params={"job": child})).json()
    nodes = {node["id"]: node for node in graph["data"]}
    assert (list(nodes), graph["has_more"]) == ([child, parent, sibling], False)
    assert {node["id"]: node["parents"] for node in graph["data"]} == {child: [parent], parent: [], sibling: [parent]}
    assert (nodes[child]["status"], nodes[parent]["status"]) == ("canceled", "queued")
    assert len(nodes[parent]["prompt"]) < 300
    anyway = {**BODY, "after": [parent], "on_parent_failure": "run"}
    other = (await api.post("/v1/jobs", json=anyway)).json()["id"]
    nodes = {node["id"]: node for node in (await api.get("/page/graph", params={"job": other})).json()["data"]}
    assert (nodes[other]["fails_with"], nodes[sibling]["fails_with"]) == ([], [parent])


async def test_the_graph_of_a_job_has_those_from_whose_results_it_starts(api: httpx.AsyncClient) -> None:
    """It fails with these whatever it is to do after the failure of others."""
    source, other = [(await api.post("/v1/jobs", json=BODY)).json()["id"] for _ in range(2)]
    body = {**BODY, "image": {"job": source}, "after": [other], "on_parent_failure": "run"}
    child = (await api.post("/v1/jobs", json=body)).json()["id"]
    (first, *others) = (await api.get("/page/graph", params={"job": child})).json()["data"]
    assert (first["parents"], first["fails_with"]) == ([other, source], [source])
    assert {node["id"] for node in others} == {source, other}
    ids = [node["id"] for node in (await api.get("/page/graph", params={"job": source})).json()["data"]]
    assert (ids[0], set(ids)) == (source, {source, child, other})
    for filters in ({"parent": source}, {"parent": source, "prompt": "circle"}):
        assert [job["id"] for job in (await api.get("/v1/jobs", params=filters)).json()["data"]] == [child]


async def test_the_jobs_of_a_graph_say_when_they_are_expected_to_end(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """As each of them does where it is read alone."""
    await fake_queue.workers.heartbeat(WorkerInfo(id="w1", models=("demo",)))
    await api.post("/v1/jobs", json=BODY)
    await deliver(fake_queue, tmp_path, await next_claim(fake_queue))
    parent = (await api.post("/v1/jobs", json=BODY)).json()
    child = (await api.post("/v1/jobs", json={**BODY, "after": [parent["id"]]})).json()
    paused = (await api.post("/v1/jobs", json={**BODY, "after": [parent["id"]]})).json()
    await api.post(f"/v1/jobs/{paused['id']}/pause")
    graph = (await api.get("/page/graph", params={"job": child["id"]})).json()["data"]
    queues = {node["id"]: node["queue"] for node in graph}
    alone = [await fake_queue.jobs.position(job_id) for job_id in queues]
    assert [one["eta_s"] for one in queues.values()] == [one and one.eta_s for one in alone]
    assert queues[child["id"]]["eta_s"] > queues[parent["id"]]["eta_s"] > 0
    assert queues[paused["id"]] == {"position": None, "eta_s": None, "reason": "paused"}


async def test_the_graph_of_a_job_is_its_tenant_s(fake_queue: Queue, tmp_path: Path) -> None:
    """Or of an operator, who names the tenant."""
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        own = await bearer(fake_queue, "acme", (Scope.JOBS_READ, Scope.JOBS_WRITE))
        job_id = (await api.post("/v1/jobs", json=BODY, headers=own)).json()["id"]
        other = await bearer(fake_queue, "other", (Scope.JOBS_READ,))
        operator = await bearer(fake_queue, "ops", (Scope.ADMIN,))
        statuses = [
            (await api.get("/page/graph", params={"job": job_id, **tenant}, headers=headers)).status_code
            for headers, tenant in (
                (own, {}),
                (other, {}),
                (other, {"tenant": "acme"}),
                (operator, {"tenant": "acme"}),
                (operator, {}),
                ({}, {}),
            )
        ]
    assert statuses == [200, 404, 403, 200, 403, 401]


async def test_the_number_of_jobs_in_a_stream_is_bounded(api: httpx.AsyncClient) -> None:
    response = await api.get("/page/live", params={"jobs": ",".join(f"job_{n}" for n in range(65))})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "jobs")


async def test_a_stream_ends_when_its_key_is_revoked(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    async with serving(fake_queue, tmp_path, auth="keys", sse_keepalive_s=0.05) as api:
        token, key = await fake_queue.api_keys.create("acme", frozenset(Scope))
        headers = {"Authorization": f"Bearer {token}"}
        job_id = (await api.post("/page/jobs", json=BODY, headers=headers)).json()["id"]
        reader = StreamingCall(api, f"/page/live?jobs={job_id}", headers)
        await reader.wait_for('"status":"queued"')
        await fake_queue.api_keys.revoke(key.id)
        await reader.read_all()


REQUESTS_OF_FORM = """
globalThis.location = new URL("http://127.0.0.1/");
const kept = { getItem: () => null, setItem() {} };
Object.assign(globalThis, { window: globalThis, localStorage: kept, sessionStorage: kept, addEventListener() {} });
globalThis.document = { baseURI: "http://127.0.0.1/", querySelector: () => null, addEventListener() {} };
const { blank, bodyFrom, needsPrompt } = await import("REQUEST_JS");
const model = {
  id: "m", tasks: ["text_to_image"], defaults: {}, limits: {}, adapters: [],
  controls: [{ id: "variation", kind: "redux" }, { id: "edges", kind: "controlnet" }],
};
const seen = [["variation", ""], ["edges", ""], ["variation", "a cat"]].map(([id, prompt]) => {
  const values = { ...blank(model), prompt, controls: [{ key: 1, id, image: { id: "in_1" } }] };
  return [needsPrompt(values, model), bodyFrom(values, model).prompt ?? null];
});
console.log(JSON.stringify(seen));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_form_needs_no_prompt_beside_redux_and_sends_no_empty_one() -> None:
    script = REQUESTS_OF_FORM.replace("REQUEST_JS", (STATIC / "views/request.js").as_uri())
    command = ["node", "--input-type=module", "--eval", script]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert shown.stdout, shown.stderr
    assert json.loads(shown.stdout) == [[False, None], [True, None], [False, "a cat"]]


FIELDS_OF_FORM = (
    REQUESTS_OF_FORM.split("const { blank")[0]
    + """
const { fieldsOf } = await import("REQUEST_JS");
const { limitFaults } = await import("LIMITS_JS");
const model = { id: "m", limits: {}, controls: [{ id: "depth", kind: "structure" }] };
const nets = { ...model, controls: [{ id: "edges", kind: "controlnet" }] };
const fault = (strength) => limitFaults({ task: "image_to_image", strength }, model).strength ?? null;
console.log(JSON.stringify({
  followed: ["image_to_image", "inpaint", "edit"].map((task) => fieldsOf(task, model).structure?.id ?? null),
  chosen: fieldsOf("image_to_image", nets).structure ?? null,
  strengths: [0, 0.01, 1, 1.5].map(fault),
}));
"""
)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_form_asks_for_the_image_to_follow_and_refuses_strengths_that_the_service_refuses() -> None:
    script = FIELDS_OF_FORM.replace("REQUEST_JS", (STATIC / "views/request.js").as_uri())
    script = script.replace("LIMITS_JS", (STATIC / "views/limits.js").as_uri())
    command = ["node", "--input-type=module", "--eval", script]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert shown.stdout, shown.stderr
    found = json.loads(shown.stdout)
    assert found["followed"] == ["depth", "depth", None]
    assert found["chosen"] is None
    assert found["strengths"] == ["above 0, at most 1", None, None, "above 0, at most 1"]


ARRANGED = """
globalThis.document = { baseURI: "http://127.0.0.1/" };
const { arrange, failingWith } = await import("GRAPH_JS");
const job = (id, parents = []) => ({ id, parents, fails_with: parents, status: "queued" });
const star = [job("a"), ...Array.from({ length: 49 }, (_, index) => job(`b${index}`, ["a"]))];
const chain = Array.from({ length: 50 }, (_, index) => job(`c${index}`, index ? [`c${index - 1}`, "deleted"] : []));
const size = ({ columns, rows, arrows }) => [columns, rows, arrows.length];
console.log(JSON.stringify([
  size(arrange(star)), size(arrange(chain.toReversed())), size(arrange([])),
  failingWith("a", star).length, failingWith("c10", chain).length, failingWith("b1", star).length,
]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_largest_graphs_are_arranged() -> None:
    """In columns by the longest way, from any order, also if a parent is deleted."""
    script = ARRANGED.replace("GRAPH_JS", (STATIC / "core/graph.js").as_uri())
    command = ["node", "--input-type=module", "--eval", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    star, chain, empty, *failing = json.loads(run.stdout)
    assert (star, chain, empty) == ([2, 49, 49], [50, 1, 49], [0, 1, 0])
    assert failing == [49, 39, 0]
