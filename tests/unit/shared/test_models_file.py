"""Models file and batch rules: contents and error messages."""

from __future__ import annotations

import json
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
from tiny.safetensors_file import file_of

from shared.config import models_file
from shared.config.batch_rules import BatchRule, BatchRules, load_batch_rules
from shared.config.model_facts import ModelFacts
from shared.config.model_spec import ModelSpec
from shared.config.models_file_edit import save_step_cache, step_cache_table, with_step_cache
from shared.config.step_schedules import StepCaching, StepSchedule
from shared.errors import ConfigurationError

VALID = '[[model]]\nid = "a"\nsource = "b"\n'
STYLE = '[[model.control]]\nid = "{}"\nsource = "c"\nkind = "ip_adapter"\nweight_name = "a.safetensors"\n'
REDUX = '[[model.control]]\nid = "{}"\nsource = "c"\nkind = "redux"\n'
REFINER = '[model.refiner]\nsource = "c"\n'
CONTROL = '[[model.control]]\nid = "edges"\nsource = "c"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model: Field required"),
        ("model = []", "model: Tuple should have at least 1 item after validation, not 0"),
        (VALID + "tasks = []\n", "model 'a': tasks: Tuple should have at least 1 item after validation, not 0"),
        (VALID + 'tasks = ["nothing"]\n', "model 'a': tasks.0: Input should be 'text_to_image'"),
        (VALID + "expected_image_s = 0\n", "model 'a': expected_image_s: Input should be greater than 0"),
        (VALID + "max_bach = 3\n", "model 'a': max_bach: unknown key"),
        (VALID + "[model.limits]\nmax_step = 3\n", "model 'a': limits.max_step: unknown key"),
        (
            VALID + '[model.step_cache]\ndefault = "strong"\nallowed = ["light"]\n',
            "model 'a': step_cache: default 'strong' is not among allowed",
        ),
        (
            VALID + "[model.step_cache]\nmedium = {every = 3, frist = 4}\n",
            "model 'a': step_cache.medium.frist: unknown key",
        ),
        (
            VALID + 'extra = ["boxes"]\n[model.defaults]\nextra = {boxes = [], seeds = 3}\n',
            "model 'a': defaults.extra has inputs that extra does not list: seeds",
        ),
        (
            VALID + "[model.defaults]\nextra = {Boxes = 1}\n",
            "model 'a': defaults.extra.Boxes.[key]: String should match",
        ),
        (VALID + "[model.quantization]\n", "model 'a': quantization: set denoiser, text_encoder or gguf"),
        (
            VALID + '[model.quantization]\ndenoiser = "int9"\n',
            "model 'a': quantization.denoiser: Input should be 'torchao-int8'",
        ),
        (
            VALID + '[model.quantization]\ngguf = {vae = "v.gguf"}\n',
            "model 'a': quantization: gguf: vae is not",
        ),
        (
            VALID + '[model.quantization]\ndenoiser = "torchao-fp8"\ngguf = {unet = "u.gguf"}\n',
            "model 'a': quantization: denoiser and gguf exclude each other",
        ),
        (
            VALID + 'offload = "group"\n[model.quantization]\ndenoiser = "torchao-fp8"\n',
            "model 'a': quantization needs offload = \"none\"",
        ),
        (VALID + 'layerwise_casting = "int4"\n', "model 'a': layerwise_casting: Input should be 'float8_e4m3fn'"),
        (VALID + VALID, "duplicate model ids or aliases: a"),
        (VALID.replace('id = "a"', 'id = "a"\naliases = ["b", "a"]'), "duplicate model ids or aliases: a"),
        (VALID + CONTROL + CONTROL, "model 'a': duplicate control ids: edges"),
        (VALID + CONTROL + 'kind = "ip_adapter"\n', "model 'a': control.0: weight_name is needed"),
        (
            VALID + STYLE.format("a") + STYLE.format("b"),
            "model 'a': a model has at most one",
        ),
        (
            VALID + REDUX.format("a") + REDUX.format("b"),
            "model 'a': a model has at most one control of kind redux",
        ),
        (
            VALID + 'compile = true\nprompt_syntax = "weights"\n',
            "model 'a': compile = true needs prompt_syntax = \"plain\"",
        ),
        (VALID + "compile = true\n" + STYLE.format("a"), "model 'a': an ip_adapter needs compile = false"),
        (VALID + CONTROL + "scale = 3.0\n", "model 'a': control.0: scale 3.0 is above max_scale 2.0"),
        (VALID + '[[model.control]]\nid = "a"\n', "model 'a': control.0: source is needed, unless"),
        (VALID + CONTROL + 'kind = "structure"\n', "model 'a': control.0: source is needed, unless"),
        (
            VALID + CONTROL + '[[model.control]]\nid = "a"\nkind = "structure"\n',
            "model 'a': a control of kind structure is the only one",
        ),
        (VALID + REDUX.format("a") + "mode = 1\n", "model 'a': control.0: mode is for control nets only"),
        (VALID + CONTROL + "mode = -1\n", "model 'a': control.0.mode: Input should be greater than or equal to 0"),
        (VALID + CONTROL + 'kind = "t2i"\n', "model 'a': control.0.kind: Input should be 'controlnet'"),
        (VALID + REFINER + "start = 1.5\n", "model 'a': refiner.start: Input should be less than or equal to 1"),
        (VALID + REFINER + "share = 0.8\n", "model 'a': refiner.share: unknown key"),
        (
            VALID + 'tasks = ["inpaint"]\n' + REFINER,
            "model 'a': a refiner needs one of the tasks text_to_image, image_to_image",
        ),
        (
            VALID + 'offload = "group"\n' + REFINER,
            "model 'a': a refiner excludes offload: remove one of them",
        ),
        (
            VALID + REFINER + '[model.quantization]\ndenoiser = "torchao-fp8"\n',
            "model 'a': a refiner excludes quantization: remove one of them",
        ),
        (VALID + 'compile = "blocks"\n' + REFINER, "model 'a': a refiner excludes compile: remove"),
        (VALID + "devices = 2\n" + REFINER, "model 'a': a refiner excludes devices: remove one"),
        (VALID + "devices = 0\n", "model 'a': devices: Input should be greater than or equal to 1"),
        (VALID + 'devices = 2\noffload = "group"\n', "model 'a': devices = 2 excludes offload: remove it"),
        (
            VALID + 'devices = 2\ncompile = true\nlayerwise_casting = "float8_e4m3fn"\n',
            "model 'a': layerwise_casting needs compile = false",
        ),
        (VALID + 'devices = 2\ncompile = "blocks"\n', "model 'a': devices = 2 excludes compile: remove it"),
        (
            VALID + 'devices = 2\nlayerwise_casting = "float8_e4m3fn"\n' + CONTROL,
            "model 'a': devices = 2 excludes control, layerwise_casting: remove",
        ),
        (
            VALID + 'devices = 2\n[model.quantization]\ntext_encoder = "torchao-int8"\n',
            "model 'a': devices = 2 excludes quantization",
        ),
        (
            VALID + 'devices = 2\n[[model.adapter]]\nid = "ink"\nsource = "c"\n',
            "model 'a': devices = 2 excludes adapter: remove it",
        ),
        (
            VALID + "devices = 2\n" + VALID.replace('"a"', '"c"') + "devices = 4\n",
            "only one model of a file can have devices above 1: a, c",
        ),
        (
            VALID + '[model.defaults]\nscheduler = "DDIM Karras"\n',
            "defaults.scheduler of model 'a': DDIMScheduler has no option 'karras'",
        ),
        (
            VALID + "[model.defaults]\nscheduler = { sigmas = [9.0, 1.0] }\n",
            "defaults.scheduler of model 'a': only requests can list steps",
        ),
        (
            VALID + "[model.defaults]\nscheduler = { karras = 3 }\n",
            "model 'a': defaults.scheduler: karras: Input should be a valid boolean",
        ),
        (VALID + '[[model]]\nsource = "b"\n', "model number 2: id: Field required"),
        ('[[model]]\nid = "a"\n', "model 'a': source is missing: set it to a folder or a hub id"),
        (
            '[[model]]\nid = "a"\ncheckpoint = "c.safetensors"\n',
            "model 'a' has no source: set it to a folder or a hub id of a model of the same architecture",
        ),
        (
            VALID + 'checkpoint = "c.safetensors"\n[model.quantization]\ndenoiser = "torchao-int8"\n',
            "model 'a': quantization excludes checkpoint",
        ),
        (
            VALID + 'checkpoint = "c.safetensors"\ndevices = 2\n',
            "model 'a': devices = 2 excludes check",
        ),
        (
            VALID + "max_batch = 4\nlimits.max_images = 8\n",
            "model 'a': limits.max_images 8 is above max_batch 4: set limits.max_images",
        ),
        ("[[model", "Expected "),
    ],
)
def test_error_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    """One fault gives one sentence."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        models_file.load(path)
    assert caught.value.message.startswith(f"{path}: {message}")
    assert ";" not in caught.value.message


def test_a_small_batch_lowers_the_images_of_a_job(tmp_path: Path) -> None:
    for batch, images in ((1, 1), (4, 4), (16, 8)):
        (spec,) = models_file.load(write(tmp_path, VALID + f"max_batch = {batch}\nlimits.multiple_of = 16\n"))
        assert (spec.limits.max_images, spec.limits.multiple_of) == (images, 16)
    (spec,) = models_file.load(write(tmp_path, VALID + "max_batch = 2\n"))
    assert spec.limits.max_images == 2


def test_error_for_a_missing_file_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="FUSEQUEUE_MODELS"):
        models_file.load(tmp_path / "none.toml")


def test_relative_source_is_a_folder_next_to_the_file(tmp_path: Path) -> None:
    """Other sources are hub ids and stay unchanged."""
    (tmp_path / "b").mkdir()
    (spec,) = models_file.load(write(tmp_path, VALID))
    assert spec.source == str(tmp_path / "b")
    (spec,) = models_file.load(write(tmp_path, VALID.replace("b", "someone/model")))
    assert spec.source == "someone/model"


H3 = '[[model]]\nid = "h3"\nsource = "h3"\ntasks = ["text_to_video"]\nlimits.max_frames = 341\n'


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("", None),
        ("limits.fps = 24", None),
        ("defaults.fps = 16", "defaults.fps of model 'h3' is 16, but its videos have 24"),
        ("limits.fps = 16", "limits.fps of model 'h3' is 16, but its videos have 24"),
    ],
)
def test_a_pipeline_that_makes_sound_for_one_rate_fixes_that_of_its_model(
    keys: str, fault: str | None, tmp_path: Path
) -> None:
    (tmp_path / "h3").mkdir()
    (tmp_path / "h3" / "modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    path = write(tmp_path, f"{H3}{keys}\n")
    with nullcontext() if fault is None else pytest.raises(ConfigurationError, match=fault):
        (spec,) = models_file.load(path)
        assert (spec.limits.fps, spec.defaults.fps) == (24, 24)


def test_a_worker_that_has_loaded_a_model_of_the_hub_knows_its_rate() -> None:
    spec = ModelSpec(id="h3", source="org/h3").with_facts(ModelFacts(fps=24))
    assert (spec.limits.fps, spec.defaults.fps) == (24, 24)


def test_a_source_that_is_a_file_is_no_hub_id(tmp_path: Path) -> None:
    """It was looked up on the hub."""
    (tmp_path / "b").write_bytes(b"weights")
    with pytest.raises(ConfigurationError, match="source of model 'a' is a file: b"):
        models_file.load(write(tmp_path, VALID))


def test_a_checkpoint_and_a_vae_are_relative_to_the_file(tmp_path: Path) -> None:
    """Without a source, the one that the file looks like is named."""
    keys = 'checkpoint = "files/c.safetensors"\nvae = "v"\n'
    spec = models_file.load(write(tmp_path, VALID + keys)).get("a")
    assert (spec.checkpoint, spec.vae) == (str(tmp_path / "files" / "c.safetensors"), str(tmp_path / "v"))
    (tmp_path / "files").mkdir()
    names = ("model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.1.model.ln_final.weight")
    (tmp_path / "files" / "c.safetensors").write_bytes(file_of({name: ([1], [0.0]) for name in names}))
    with pytest.raises(ConfigurationError, match='like Stable Diffusion XL, set it to "stabilityai/stable-'):
        models_file.load(write(tmp_path, f'[[model]]\nid = "a"\n{keys}'))


def test_a_refiner_is_a_folder_next_to_the_file_or_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for source, is_on_hub in (("someone/refiner", True), (str(tmp_path / "c"), False)):
        spec = models_file.load(write(tmp_path, VALID + REFINER.replace('"c"', f'"{source}"'))).get("a")
        assert spec.refiner is not None
        assert (spec.refiner.source, spec.refiner.start, spec.is_on_hub) == (source, 0.8, is_on_hub)
        assert spec.file_names == (f"refiner={source if is_on_hub else 'c'}",)
        (tmp_path / "c").mkdir(exist_ok=True)
    spec = models_file.load(write(tmp_path, VALID + REFINER)).get("a")
    assert spec.refiner is not None
    assert spec.refiner.source == str(tmp_path / "c")


def test_files_of_quantized_weights_are_relative_to_the_file(tmp_path: Path) -> None:
    text = VALID + '[model.quantization]\ngguf = {transformer = "weights/t.gguf", transformer_2 = "/t2.gguf"}\n'
    (spec,) = models_file.load(write(tmp_path, text))
    assert spec.quantization is not None
    assert spec.quantization.gguf == {"transformer": str(tmp_path / "weights/t.gguf"), "transformer_2": "/t2.gguf"}


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ('compile = "blocks"\n', "needs compile = false"),
        ("compile = true\n", "needs compile = false"),
        ('offload = "group"\n', 'needs offload = "none"'),
        ('[model.quantization]\ndenoiser = "torchao-int8"\n', "needs no quantization of the denoiser"),
        ('[model.quantization]\ngguf = {unet = "u.gguf"}\n', "needs no quantization of the denoiser"),
        ('[model.quantization]\ntext_encoder = "torchao-int8"\n', None),
        ("vae_tiling = true\nvae_slicing = true\n", None),
    ],
)
def test_layerwise_casting_excludes_what_changes_the_same_weights(keys: str, fault: str | None, tmp_path: Path) -> None:
    path = write(tmp_path, VALID + 'layerwise_casting = "float8_e4m3fn"\n' + keys)
    if fault is None:
        (spec,) = models_file.load(path)
        assert spec.layerwise_casting == "float8_e4m3fn"
        return
    with pytest.raises(ConfigurationError, match=f"layerwise_casting {fault}"):
        models_file.load(path)


QWEN = ("qwen", "Qwen/Qwen-Image")
RULES = BatchRules(
    schema_version=1,
    rules=(
        BatchRule(model_contains="qwen-image", resolution="1024x1024", max_batch_size=2),
        BatchRule(model_contains="QWEN", max_batch_size=6),
        BatchRule(model_contains="flux", resolution="512x512", max_batch_size=64),
    ),
)


@pytest.mark.parametrize(
    ("names", "size", "expected", "why"),
    [
        (QWEN, (1024, 1024), 2, "the lower of two matching rules"),
        (QWEN, (512, 512), 6, "a rule without a resolution matches every size"),
        (QWEN, (1024, 768), 6, "a resolution is both sides"),
        (("qwen", "/models/q"), (1024, 1024), 6, "the id or the source contains the name"),
        (("flux", "f"), (512, 512), 8, "no rule raises the limit of models.toml"),
        (("sd", "s"), (512, 512), 8, "no rule, no change"),
    ],
)
def test_lowest_matching_batch_rule_counts(
    names: tuple[str, str], size: tuple[int, int], expected: int, why: str
) -> None:
    assert RULES.max_batch(names, 8, *size) == expected, why


RULE = {"model_contains": "a", "max_batch_size": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"schema_version": 1, "rules": [], "rule": []}, "rule: unknown key"),
        ({"schema_version": 1, "rules": [{**RULE, "max_batch": 2}]}, "rules.0.max_batch: unknown key"),
        ({"schema_version": 2, "rules": []}, "schema_version: Input should be 1"),
        ({"rules": []}, "schema_version: Field required"),
        ({"schema_version": 1}, "rules: Field required"),
        ({"schema_version": 1, "rules": [{"model_contains": "a"}]}, "rules.0.max_batch_size: Field required"),
        ({"schema_version": 1, "rules": [{**RULE, "max_batch_size": 0}]}, "rules.0.max_batch_size: Input should be "),
        ({"schema_version": 1, "rules": [{**RULE, "max_batch_size": "2"}]}, "rules.0.max_batch_size: Input should be "),
        ({"schema_version": 1, "rules": [{**RULE, "resolution": "1024"}]}, "rules.0.resolution: String should match"),
        ([], "Input should be an object"),
    ],
)
def test_batch_rules_error_names_file_and_key(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load_batch_rules(path)
    assert caught.value.message.startswith(f"{path}: {message}")


def test_missing_or_invalid_batch_rules_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="FUSEQUEUE_BATCH_RULES"):
        load_batch_rules(tmp_path / "nowhere.json")
    (tmp_path / "invalid.json").write_text("{", "utf-8")
    with pytest.raises(ConfigurationError, match="Invalid JSON"):
        load_batch_rules(tmp_path / "invalid.json")


def test_catalog_applies_batch_rules(tmp_path: Path) -> None:
    """API and workers use it, so they agree on the size of a full batch."""
    write(tmp_path, '[[model]]\nid = "a"\nsource = "b"\nmax_batch = 8\n')
    (tmp_path / "rules.json").write_text(
        json.dumps({"schema_version": 1, "rules": [{**RULE, "resolution": "512x512"}]}), "utf-8"
    )
    catalog = models_file.load(tmp_path / "models.toml", tmp_path / "rules.json")
    assert catalog.for_size("a", 512, 512).max_batch == 2
    assert catalog.for_size("a", 512, 768).max_batch == 8
    assert models_file.load(tmp_path / "models.toml").for_size("a", 512, 512).max_batch == 8


MODELS = """# The models.

[[model]]
id = "first"
source = "a"

[model.limits]
max_steps = 20

[[model.adapter]]
id = "second"
source = "b"

# Another one.
[[model]]
id = "second"  # not the adapter
source = "c"
# compile = true

# Sizes.
[model.defaults]
steps = 30
"""
CACHING = StepCaching(allowed=("medium",), medium=StepSchedule(every=3, of="residual"))


@pytest.mark.parametrize("model", ["first", "second"])
def test_a_step_cache_table_goes_to_its_model_and_replaces_an_older_one(model: str) -> None:
    older = with_step_cache(MODELS, model, StepCaching(default="light"))
    text = with_step_cache(older, model, CACHING)
    assert text == with_step_cache(MODELS, model, CACHING)
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in MODELS.splitlines() if line.startswith("#")
    ]
    found = {one["id"]: one.pop("step_cache", None) for one in tomllib.loads(text)["model"]}
    assert StepCaching.model_validate(found.pop(model)) == CACHING
    assert list(found.values()) == [None], "the other model"


def test_a_model_without_tables_gets_one_at_its_end() -> None:
    text = with_step_cache('[[model]]\nid = "a"\nsource = "b"\n', "a", CACHING)
    assert text == f'[[model]]\nid = "a"\nsource = "b"\n\n{step_cache_table(CACHING)}'


@pytest.mark.parametrize(
    "text",
    [
        'model = [{id = "a", source = "b"}]\n',
        '[[model]]\nid = "a"\nsource = "b"\nstep_cache = {default = "light"}\n',
        '[[model]]\nid = "a"\nsource = "b"\n[model.step_cache]\n\ndefault = "light"\n',
    ],
)
def test_a_models_file_of_an_unusual_form_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="by hand"):
        save_step_cache(path, "a", CACHING)
    assert path.read_text() == text


def test_a_write_that_fails_leaves_the_models_file_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, VALID)
    (tmp_path / "models.toml.part").mkdir()
    with pytest.raises(ConfigurationError, match="by hand"):
        save_step_cache(path, "a", CACHING)
    assert path.read_text() == VALID
