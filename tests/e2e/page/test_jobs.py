"""Jobs in a browser, from the prompt to the image: the playground, running and finished jobs, cost and usage."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from harness.axe import check
from harness.http_server import png
from harness.waiting import wait_until
from PIL import Image
from playwright.sync_api import Page, Route, expect

PROMPT = "a red circle on a blue ground, left"
UNREADABLE = (
    ("deadline_s", "10m", "deadline_s"),
    ("metadata", "order 12", "is not key=value"),
    ("seed", "9007199254740993", "seed is at most"),
)
SHOWN = "image => image.complete && image.naturalWidth > 0"


def generate(page: Page, prompt: str = PROMPT, steps: int = 12) -> None:
    page.get_by_role("spinbutton", name="Steps").fill(str(steps))
    page.get_by_role("textbox", name="Prompt", exact=False).first.fill(prompt)
    page.get_by_role("button", name=re.compile("^Generate")).click()


def result(page: Page) -> Any:
    """Wait for the result, and return its panel."""
    panel = page.locator(".run-panel")
    expect(panel.get_by_role("heading", name="Result")).to_be_visible()
    return panel


def test_a_prompt_to_its_image_in_three_clicks(open_page: Any, working: Any, wait_for_preview: Any) -> None:
    """Its previews are shown while it runs; its parameters when it has ended."""
    page = open_page(working.url)
    page.get_by_role("link", name="Playground", exact=True).click()
    page.locator("textarea").click()
    page.keyboard.type(PROMPT)
    page.get_by_role("spinbutton", name="Steps").evaluate(
        "field => { field.value = 100; field.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    page.get_by_role("button", name="Generate").click()
    wait_for_preview(page)
    panel = result(page)
    expect(panel.locator(".artifact img")).to_be_visible()
    page.wait_for_function(f"() => ({SHOWN})(document.querySelector('.run-panel .artifact img'))")
    (job,) = [job for job in working.read("/v1/jobs")["data"] if job["steps"] == 100]
    expect(panel).to_contain_text(str(job["seed"]))
    assert (job["status"], job["prompt"]) == ("succeeded", PROMPT)


def test_the_same_with_another_seed_and_a_duplicate_to_edit(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    generate(page, "a green square on a white ground", steps=4)
    first = result(page).locator(".mono").first.inner_text()
    page.get_by_role("button", name="Same with another seed").click()
    expect(page.get_by_role("navigation", name="Runs of this tab").get_by_role("button")).to_have_count(2)
    expect(result(page).locator(".mono").first).not_to_have_text(first)
    page.get_by_role("button", name="Duplicate and edit").click()
    expect(page.locator("[name=seed]")).to_have_value(result(page).locator(".mono").first.inner_text())


def test_a_job_starts_from_an_uploaded_image(open_page: Any, working: Any, tmp_path: Path) -> None:
    picked = tmp_path / "start.png"
    picked.write_bytes(png())
    page = open_page(working.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("image_to_image")
    page.locator("input[name=image]").set_input_files(picked)
    expect(page.locator(".chosen img")).to_be_visible()
    generate(page, "a yellow star", steps=6)
    result(page)
    job = working.read("/v1/jobs", limit="1")["data"][0]
    assert (job["task"], job["status"]) == ("image_to_image", "succeeded")
    assert job["image"] is not None


DROP = """(element, type) => {
    const data = new DataTransfer();
    data.items.add(new File(["x"], "notes.pdf", { type }));
    return element.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


def test_a_pasted_image_is_used(open_page: Any, working: Any) -> None:
    """Another file that is dropped is refused by its name; beside the field, where it would replace the page, too."""
    page = open_page(working.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("image_to_image")
    expect(page.get_by_role("button", name="Choose an image")).to_be_visible()
    page.evaluate(
        """async bytes => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "pasted.png", { type: "image/png" }));
            dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        }""",
        list(png()),
    )
    expect(page.locator(".chosen img")).to_be_visible()
    page.get_by_role("button", name="Remove pasted.png").click()
    assert not page.locator(".drops").evaluate(DROP, "application/pdf")
    expect(page.get_by_role("alert")).to_have_text("notes.pdf is not a PNG, JPEG or WebP.")
    assert not page.locator("body").evaluate(DROP, "application/pdf")


def test_a_request_is_submitted_once_however_often_it_is_asked_for(open_page: Any, working: Any, hold: Any) -> None:
    """Neither a click nor a key that is held down submits another one while the first is on its way."""
    page = open_page(working.url, "#/playground")
    held = hold(page, "**/page/jobs")
    generate(page, "a grey square", steps=4)
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    page.locator("textarea").focus()
    for _ in range(2):
        page.keyboard.down("Control")
        page.keyboard.down("Enter")
    assert len(held) == 1
    held[0].continue_()
    result(page)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    assert len([job for job in working.read("/v1/jobs")["data"] if job["prompt"] == "a grey square"]) == 1


def test_an_address_that_changes_while_the_page_is_drawn_is_followed(open_page: Any, working: Any) -> None:
    page = open_page(working.url)
    page.add_init_script("""new MutationObserver((_, observer) => {
        if (!document.querySelector("#app > :not(noscript)")) return;
        observer.disconnect();
        location.hash = "#/playground";
    }).observe(document, { childList: true, subtree: true });""")
    page.reload()
    expect(page.get_by_role("button", name="Generate")).to_be_visible()


def test_images_of_two_uploads_at_once_are_both_used(open_page: Any, working: Any, tmp_path: Path, hold: Any) -> None:
    """Also when a control before them is removed meanwhile, and with the same file twice."""
    picked = tmp_path / "edges.png"
    picked.write_bytes(png())
    control = {"id": "canny", "kind": "controlnet", "scale": 1.0, "max_scale": 2.0}

    def with_controls(route: Route) -> None:
        models = route.fetch().json()
        models["data"][0]["controls"] = [control]
        models["data"][0]["limits"]["max_controls"] = 3
        route.fulfill(json=models)

    page = open_page(working.url)
    page.route("**/v1/models", with_controls)
    page.goto(f"{working.url}/#/playground")  # only the fragment is another: the page is not loaded again
    held = hold(page, "**/v1/inputs")
    for _ in range(3):
        page.get_by_role("button", name="Add canny").click()
    controls = page.locator(".control")
    for index in (1, 2):
        controls.nth(index).locator("input[type=file]").set_input_files(picked)
        assert controls.nth(index).locator("input[type=file]").input_value() == ""
    wait_until(lambda: page.evaluate("1") and len(held) == 2, "both are uploaded")
    controls.first.get_by_role("button", name="Remove", exact=True).click()
    expect(controls).to_have_count(2)
    for route in held:
        route.continue_()
    expect(page.locator(".chosen img")).to_have_count(2)


def test_a_field_that_cannot_be_read_is_not_left_out(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    page.locator("textarea").fill(PROMPT)
    page.get_by_text("More", exact=True).click()
    for name, text, fault in UNREADABLE:
        page.locator(f"[name={name}]").fill(text)
        button = page.get_by_role("button", name="Generate")
        if button.is_enabled():
            button.click()
        expect(page.get_by_role("alert").filter(has_text=fault)).to_be_visible()
        page.locator(f"[name={name}]").fill("")


def test_a_task_without_its_image_is_refused(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("image_to_image")
    generate(page)
    expect(page.locator(".field").filter(has=page.locator(".drops")).get_by_role("alert")).to_contain_text("needs one")


def test_a_mask_is_painted_over_the_image(open_page: Any, working: Any, tmp_path: Path) -> None:
    """White where it was painted, black elsewhere."""
    picked = tmp_path / "start.png"
    picked.write_bytes(png())
    page = open_page(working.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("inpaint")
    page.locator("input[name=image]").set_input_files(picked)
    page.get_by_role("button", name="Paint a mask").click()
    use = page.get_by_role("button", name="Use the mask")
    expect(use).to_be_disabled()
    box = page.get_by_role("img", name="Mask").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] + 5, middle[1])
    page.mouse.up()
    check(page, "dark")
    use.click()
    expect(page.locator(".chosen img")).to_have_count(2)
    generate(page, "a blue star", steps=6)
    result(page)
    job = working.read("/v1/jobs", limit="1")["data"][0]
    assert (job["task"], job["status"], job["warnings"]) == ("inpaint", "succeeded", [])
    content = working.client.get(f"/v1/inputs/{job['mask']['id']}/content").content
    with Image.open(BytesIO(content)) as mask:
        grey = mask.convert("L")
    width, height = grey.size
    assert grey.getpixel((width // 2, height // 2)) == 255
    assert grey.getpixel((0, 0)) == grey.getpixel((width - 1, height - 1)) == 0


def test_inpainting_starts_at_the_strength_of_a_request_without_one(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    task, strength = page.get_by_role("combobox", name="Task"), page.locator("[name=strength]")
    for name, usual in (("inpaint", "1"), ("image_to_image", "0.6"), ("inpaint", "1")):
        task.select_option(name)
        expect(strength).to_have_value(usual)
        expect(page.locator(".snippets code")).not_to_contain_text("strength")
    strength.fill("0.5")
    task.select_option("image_to_image")
    expect(strength).to_have_value("0.5")


REQUESTS = """async () => {
    const folder = document.querySelector("script[src$='app.js']").src.replace("app.js", "");
    const { blank, bodyFrom, valuesFrom } = await import(`${folder}views/request.js`);
    const { bodyOf, bodyFromResult } = await import(`${folder}core/actions.js`);
    const [demo] = (await (await fetch("v1/models")).json()).data;
    const model = {
        ...demo, tasks: ["text_to_image", "edit", "inpaint"], limits: { ...demo.limits, max_input_images: 2 },
        defaults: { ...demo.defaults, negative_prompt: "text" },
        step_cache: { ...demo.step_cache, default: "light", allowed: ["light", "strong"] },
    };
    const other = { ...model, id: "other", defaults: { ...demo.defaults, negative_prompt: "blur" } };
    const values = { ...blank(model), prompt: "a circle" };
    const from = changes => bodyFrom({ ...values, ...changes }, model);
    const image = { id: "in_1" };
    const job = {
        ...(await (await fetch("v1/jobs?limit=1")).json()).data[0], negative_prompt: "", output_quality: 50,
        task: "edit", images: [image, { id: "in_2" }], output: { put_urls: [], bucket: "results", prefix: "acme" },
        clip_skip: 2,
    };
    const again = changes => bodyOf({ ...job, ...changes }, model);
    const band = {
        ...model, tasks: ["text_to_audio", "audio_to_audio", "audio_inpaint"],
        limits: { ...demo.limits, max_duration_s: 60 }, defaults: { ...demo.defaults, duration_s: 10 },
    };
    const repainted = { model: model.id, prompt: "a solo", audio: "in_3", duration_s: 5, repaint_start_s: 2 };
    const twice = body => bodyFrom(valuesFrom(body, [band]), band);
    const larger = { ...model, tasks: ["upscale_video"], upscale_factors: [2.25, 2, 4] };
    const upscaled = upscale_factor => {
        const body = { model: model.id, video: "in_4", upscale_factor };
        return bodyFrom(valuesFrom(body, [larger]), larger).upscale_factor ?? "none";
    };
    return {
        upscaled: [4, 2.25, undefined].map(upscaled),
        to_the_end: twice(repainted).repaint_end_s ?? "none",
        to_a_second: twice({ ...repainted, repaint_end_s: 4 }).repaint_end_s,
        plain: from({}),
        negative: from({ negative_prompt: "" }).negative_prompt,
        edit: from({ task: "edit", images: [image] }),
        inpaint: from({ task: "inpaint", images: [image] }).task,
        other_model: blank(other, values, model).negative_prompt,
        kept: blank(other, { ...values, negative_prompt: "" }, model).negative_prompt,
        all_steps: again({ step_cache: null }).step_cache,
        strong: again({ step_cache: model.step_cache.strong }).step_cache ?? "none",
        light: again({ step_cache: model.step_cache.light }).step_cache ?? "none",
        unrefined: bodyOf({ ...job, refiner_start: null }, { ...model, refiner: { start: 0.8 } }).refiner_start,
        refined: again({ refiner_start: 0.6 }).refiner_start,
        without_refiner: again({}).refiner_start ?? "none",
        again: bodyFrom(valuesFrom(again({}), [model]), model),
        of_a_source: again({ images: [0, 2].map(artifact => ({ id: null, job: "job_1", artifact })) }).images,
        result: bodyFrom(valuesFrom(bodyFromResult(job, model), [model]), model),
        video: bodyFromResult({ ...job, task: "text_to_video", images: [], artifacts: [{ kind: "video" }] }, model),
    };
}"""


def test_requests_name_what_differs_from_the_defaults_of_their_model(open_page: Any, working: Any) -> None:
    """Of a model with a negative prompt, an edit of images, and levels of step caching, but no schedules."""
    job_id = working.submit(prompt="a circle", steps=4)
    working.finish(job_id)
    found = open_page(working.url).evaluate(REQUESTS)
    assert found["plain"] == {"model": "demo", "prompt": "a circle"}
    assert (found["negative"], found["other_model"], found["kept"]) == ("", "blur", "")
    assert (found["edit"]["width"], found["edit"]["height"]) == (64, 64), "else those of the image"
    assert found["inpaint"] == "inpaint", "the service names the missing mask"
    assert (found["all_steps"], found["strong"], found["light"]) == ("off", "strong", "none")
    assert (found["unrefined"], found["refined"], found["without_refiner"]) == (1, 0.6, "none")
    assert (found["to_the_end"], found["to_a_second"]) == ("none", 4)
    assert found["upscaled"] == [4, "none", "none"], "the first factor is the model's default"
    again, result = found["again"], found["result"]
    assert (again["negative_prompt"], again["output_quality"], again["images"]) == ("", 50, ["in_1", "in_2"])
    assert again["clip_skip"] == 2, "the form has no input for it"
    assert [image.removeprefix(working.url) for image in found["of_a_source"]] == [
        "job_1",
        "/v1/jobs/job_1/artifacts/2",
    ]
    assert again["output"] == result["output"] == {"bucket": "results", "prefix": "acme"}
    assert (result["image"], result.get("images")) == (job_id, None)
    video = found["video"]
    assert (video["video"], video["task"], "image" in video) == (job_id, "video_to_video", False)


def test_an_invalid_field_is_named_beside_it(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    page.get_by_text("More", exact=True).click()
    page.get_by_role("textbox", name="Deadline, seconds").fill("soon")
    generate(page)
    expect(page.locator(".is-faulty").filter(has_text="Deadline").get_by_role("alert")).to_contain_text("deadline_s")


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("Width", "65", "a multiple of 8"),
        ("Height", "136", "from 64 to 128"),
        ("Steps", "101", "from 1 to 100"),
        ("Guidance", "21", "from 0 to 20"),
        ("Images", "9", "from 1 to 8"),
    ],
)
def test_a_limit_of_the_model_is_named_before_anything_is_sent(
    open_page: Any, working: Any, field: str, value: str, fault: str
) -> None:
    page = open_page(working.url, "#/playground")
    page.get_by_role("textbox", name="Prompt", exact=False).first.fill(PROMPT)
    expect(page.get_by_role("button", name=re.compile("^Generate"))).to_be_enabled()
    page.get_by_role("spinbutton", name=field).fill(value)
    expect(page.locator(".is-faulty").filter(has_text=field).get_by_role("alert")).to_have_text(fault)
    expect(page.get_by_role("button", name=re.compile("^Generate"))).to_be_disabled()


@pytest.mark.parametrize("client", ["curl", "Python", "CLI", "OpenAI"])
def test_the_equivalent_calls_do_the_same(open_page: Any, working: Any, tmp_path: Path, client: str) -> None:
    """Each is run as it is copied."""
    page = open_page(working.url, "#/playground")
    page.get_by_role("spinbutton", name="Steps").fill("4")
    page.locator("[name=seed]").fill("7")
    page.get_by_role("spinbutton", name="Images").fill("2")
    page.locator("textarea").fill(f'--a {client} circle\'s "edge"')
    page.get_by_role("group", name="Client").get_by_role("button", name=client).click()
    text = page.locator(".snippets code").inner_text()
    if client in ("curl", "CLI"):
        command = ["bash", "-ec", text.replace("fusequeue submit", f"{sys.executable} -m cli.main submit", 1)]
    else:
        command = [sys.executable, "-c", text]
    env = dict(working.env)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    job = working.read("/v1/jobs", limit="1")["data"][0]
    names = ("model", "prompt", "steps", "seed", "n", "priority", "status")
    expected = ("demo", f'--a {client} circle\'s "edge"', 4, 7, 2, "standard", "succeeded")
    assert tuple(job[name] for name in names) == expected
    assert len(list(tmp_path.rglob("*.png"))) == (0 if client == "curl" else 2)


def cancel(stack: Any, job_id: str) -> None:
    """Cancel a job and wait for its end: it is no batch mate of the next test's jobs."""
    stack.client.post(f"/v1/jobs/{job_id}/cancel")
    stack.finish(job_id)


def measured_rows(stack: Any) -> set[int]:
    """Return the numbers of rows in the saved cost curves."""
    return {point["rows"] for curve in stack.read("/v1/cost-curves")["data"] for point in curve["points"]}


def test_now_shows_a_running_job_with_its_step_and_cancels_it(open_page: Any, working: Any) -> None:
    page = open_page(working.url)
    expect(page.get_by_role("img", name="0 of 16 slots are in use")).to_be_visible()
    job_id, mate = [working.submit(prompt=f"a {colour} circle", steps=100, n=8) for colour in ("red", "blue")]
    row = page.locator(".run").filter(has_text=job_id[-6:])
    expect(row).to_be_visible()
    expect(row).to_contain_text(re.compile(r"step \d+ of 800"))
    # Both jobs, unless earlier ones have shown that a forward of 16 rows gains nothing here.
    expect(page.get_by_role("img", name=re.compile("^(8|16) of 16 slots are in use"))).to_be_visible()
    row.get_by_role("button", name=f"Cancel {job_id}").click()
    assert working.finish(job_id)["status"] == "canceled"
    expect(row).to_have_count(0)
    assert working.job(mate)["status"] != "canceled"
    cancel(working, mate)


def test_now_shows_the_latest_results_while_thousands_are_queued(open_page: Any, working: Any) -> None:
    """The newest jobs are all queued then, and those before them are of the same second."""
    working.client.put("/v1/pauses/models/demo", json={"reason": "so that they stay queued"}).raise_for_status()
    lines = "".join(f'{{"model": "demo", "prompt": "{PROMPT}", "batch_id": "flood"}}\n' for _ in range(300))
    headers = {"Content-Type": "application/x-ndjson"}
    first = working.submit(prompt="the first one of a flood", steps=2, priority="interactive")
    working.client.post("/v1/jobs:bulk", content=lines, headers=headers).raise_for_status()
    page = open_page(working.url)
    results = page.locator(".panel").filter(has_text="Latest results")
    working.client.delete("/v1/pauses/models/demo").raise_for_status()
    working.finish(first)
    expect(results.get_by_role("button", name=re.compile("the first one of a flood")).first).to_be_visible()
    working.client.post("/v1/jobs:cancel", params={"batch_id": "flood"}).raise_for_status()


def test_rows_below_the_pointer_stay_while_newer_jobs_arrive(open_page: Any, working: Any) -> None:
    working.submit(prompt="a red circle below the pointer", steps=2)
    page = open_page(working.url, "#/jobs")
    rows = page.locator("tr[data-job]")
    expect(rows.first).to_contain_text("below the pointer")
    rows.first.hover()
    working.submit(prompt="a newer green square", steps=2)
    page.get_by_role("button", name="Show 1 newer job").click()
    expect(rows.first).to_contain_text("a newer green square")
    page.mouse.move(0, 0)
    working.submit(prompt="the newest blue circle", steps=2)
    expect(rows.first).to_contain_text("the newest blue circle")


def test_a_group_is_paused_resumed_and_downloaded(open_page: Any, working: Any) -> None:
    """Its progress, its jobs by a link, and the archive of its files with their manifest."""
    working.client.put("/v1/pauses/models/demo", json={"reason": "so that they stay queued"}).raise_for_status()
    ids = [working.submit(prompt=f"a ring of group {n}", steps=2, group="nightly") for n in range(2)]
    page = open_page(working.url, "#/groups")
    group = page.get_by_role("article", name="Group nightly")
    for verb, state in (("Pause", "paused"), ("Resume", "queued")):
        group.get_by_role("button", name=verb).click()
        dialog = page.get_by_role("dialog", name=f"{verb} the jobs of nightly?")
        dialog.get_by_role("button", name=verb).click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(group.locator(".badge")).to_have_text(state)
    working.client.delete("/v1/pauses/models/demo").raise_for_status()
    for job_id in ids:
        working.finish(job_id)
    expect(group.locator(".badge")).to_have_text("ended")
    expect(group).to_contain_text("2 of 2 jobs")
    with page.expect_download() as started:
        group.get_by_role("button", name="Download").click()
    assert started.value.suggested_filename == "nightly.zip"
    names = zipfile.ZipFile(started.value.path()).namelist()
    assert [name.partition("-")[0] for name in names] == [*ids, "manifest.jsonl"]
    group.get_by_role("link", name="its jobs").click()
    expect(page.locator("tbody tr")).to_have_count(2)


def test_a_job_s_page_has_its_timeline_events_and_json(open_page: Any, working: Any) -> None:
    job_id = working.submit(prompt="a green ring on a white ground", steps=12, seed=5, metadata={"order": "12"})
    page = open_page(working.url, f"#/jobs/{job_id}")
    expect(page.locator(".job-head .badge")).to_have_text("succeeded")
    expect(page.get_by_role("img", name=re.compile("^Timeline: queued .*, forwards .*, upload "))).to_be_visible()
    expect(page.locator(".events")).to_contain_text("succeeded")
    ended_at = page.locator(".facts").get_by_text("Ended", exact=True).locator("xpath=following-sibling::*[1]")
    later = open_page(working.url, f"#/jobs/{job_id}")  # its event has the time of the end, not of the visit
    expect(later.locator(".events time")).to_have_text((ended_at.inner_text().split() or ["?"])[-1])
    expect(page.get_by_role("button", name=re.compile("^Enlarge"))).to_be_visible()
    page.get_by_text("Raw JSON").click()
    expect(page.locator(".raw code")).to_contain_text(f'"id": "{job_id}"')
    page.get_by_role("link", name="order=12").click()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_model_shows_its_cost_by_rows_and_a_job_the_rows_of_its_forwards(open_page: Any, working: Any) -> None:
    job_id = working.submit(prompt="a red ring", steps=20, n=2)
    working.finish(job_id)
    page = open_page(working.url, f"#/jobs/{job_id}")
    expect(page.get_by_role("img", name="Rows of its forwards in order: 20 of 2")).to_be_visible()
    wait_until(lambda: 2 in measured_rows(working), "the worker saves its curve")
    page.goto(f"{working.url}/#/models")
    costs = page.get_by_role("region", name="Batch cost curve")
    expect(costs.get_by_role("img", name=re.compile(r"^Cost of a forward at 64x64 on cpu: .*2 rows"))).to_be_visible()
    expect(costs).to_contain_text("Efficient up to")


def test_tenants_show_their_usage_by_model_and_their_limits(open_page: Any, working: Any) -> None:
    """With the mouse and with the keyboard; the address keeps the period and the open tenant."""
    job_id = working.submit(prompt="a red circle", steps=4, n=2)
    working.finish(job_id)
    (used,) = working.read("/v1/usage?group_by=tenant")["data"]
    page = open_page(working.url, "#/tenants")
    row = page.locator(".tenants-use tbody tr").first
    expect(row).to_contain_text("default")
    assert used["images"] >= 2
    expect(row.get_by_role("cell").nth(1)).to_have_text(str(used["images"]))
    expect(row).to_contain_text("of 50,000")
    models = page.get_by_role("button", name="Models of default")
    expect(models).to_have_attribute("aria-expanded", "false")
    models.click()
    expect(page.locator(".of-model")).to_contain_text("demo")
    page.get_by_role("button", name="30 days").click()
    expect(page.get_by_role("button", name="30 days")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".of-model")).to_contain_text("demo")
    page.reload()
    expect(page.locator(".of-model")).to_contain_text("demo")
    page.get_by_role("button", name="Models of default").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".of-model")).to_have_count(0)
    page.get_by_label("Tenant", exact=True).fill("other")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No tenant begins so.")).to_be_visible()


def test_a_finished_job_its_image_and_a_running_one_are_accessible(open_page: Any, working: Any) -> None:
    done = working.submit(prompt="a red circle", steps=4)
    working.finish(done)
    running = working.submit(prompt="a blue circle", steps=100, n=4)
    page = open_page(working.url)
    expect(page.locator(".run").first).to_be_visible()
    check(page, "light", "dark")
    cancel(working, running)
    page.goto(f"{working.url}/#/jobs/{done}")
    expect(page.locator(".job-head")).to_be_visible()
    check(page, "light", "dark")
    page.get_by_role("button", name="Enlarge").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    check(page, "light", "dark")
