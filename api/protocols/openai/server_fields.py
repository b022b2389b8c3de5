"""Fields of other servers' OpenAI-style bodies: ours under another name, or ignored with a warning.

vLLM-Omni, SGLang and their benchmarks send them. A field in neither table is an error that names it.
"""

from collections.abc import Mapping
from typing import Any

from api import strict_json
from api.protocols.adapter_names import adapter_named
from shared.errors import InvalidRequest
from shared.job_record import FieldWarning

ALIASES = {
    "num_outputs_per_prompt": "n",
    "num_images_per_prompt": "n",
    "num_videos_per_prompt": "n",
    "image_reference": "input_reference",
    "reference_url": "input_reference",
}

_ADAPTERS = ("lora", "loras")
"""Adapters as an object or a list, with names of the allow-list; a form has them as JSON, or as one name."""

_ADAPTER_ALIASES = {"name": "id", "lora_name": "id", "adapter": "id", "lora_scale": "scale"}
_ADAPTER_IGNORED = frozenset(("path", "local_path", "lora_path", "lora_local_path", "int_id", "lora_int_id"))

NESTED = ("extra_body", "video_params")
"""Objects with fields that count as fields of the body; a form has them as JSON."""

IGNORED = frozenset(
    (
        # the language model in front of the denoiser, which writes or reads the prompt
        *("bot_task", "sys_type", "system_prompt", "use_system_prompt", "infer_align_image_size"),
        # the noise schedule and where noise is drawn: the model's own scheduler settings and the seed decide
        *("flow_shift", "audio_flow_shift", "boundary_ratio", "generator_device", "rollout", "rollout_sde_type"),
        # speed and memory: the service decides; `step_cache` is our own
        *("enable_teacache", "vae_use_slicing", "vae_use_tiling"),
        # work on finished videos
        *("generate_sound", "sound_duration", "enable_frame_interpolation", "frame_interpolation_exp"),
        *("frame_interpolation_scale", "frame_interpolation_model_path"),
        # where the server keeps its output
        *("output_path", "output_file_name", "save_output", "return_file_paths_only"),
        # arguments of one server's pipelines
        *("extra_params", "extra_args", "diffusers_kwargs"),
    )
)

_QUALITY_NAMES = frozenset(("default", "low", "medium", "high", "maximum"))


Warnings = tuple[FieldWarning, ...]


def own_fields(body: Any) -> tuple[dict[str, Any], Warnings]:
    """Return the fields of a body under our names, and warnings about those without effect.

    null counts as unset, as SDKs send it. A field of the body outweighs one of a nested object, and our own name
    outweighs another server's.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body: it must be a JSON object")
    sent = _flat(body)
    values = {name: value for name, value in sent.items() if name not in ALIASES and name not in IGNORED}
    warnings = [_ignored(name, "this service has no such option") for name in sent if name in IGNORED]
    for name, target in ALIASES.items():
        if name in sent and values.setdefault(target, sent[name]) != sent[name]:
            warnings.append(_ignored(name, f"{target} was sent too"))
    for name in _ADAPTERS:
        if name in values:
            adapters, ignored = _adapters(name, values.pop(name))
            warnings += ignored
            if values.setdefault("adapters", adapters) is not adapters:
                warnings.append(_ignored(name, "adapters was sent too"))
    if str(values.get("output_quality")) in _QUALITY_NAMES:
        del values["output_quality"]
        warnings.append(_ignored("output_quality", "send a number from 1 to 100"))
    return values, tuple(sorted(warnings, key=lambda warning: warning.param))


def _flat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body and of its nested objects."""
    fields = {name: value for name, value in body.items() if value is not None}
    for name in NESTED:
        if name in fields:
            nested = _object(name, fields.pop(name))
            fields = {key: value for key, value in nested.items() if value is not None} | fields
    return fields


def _adapters(name: str, value: Any) -> tuple[list[Any], list[FieldWarning]]:
    """Return the adapters of a request under our names, and warnings about what names their weights elsewhere."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _decoded(name, value)
    adapters: list[Any] = []
    warnings: dict[str, FieldWarning] = {}
    for item in value if isinstance(value, list) else [value]:
        sent = {"id": item} if isinstance(item, str) else item
        if isinstance(sent, dict):
            sent = _with_place(sent)
            for key in sent.keys() & _ADAPTER_IGNORED:
                field = f"{name}.{key}"
                warnings[field] = _ignored(field, "adapters are those of the model's allow-list, by name")
            sent = {_ADAPTER_ALIASES.get(key, key): field for key, field in sent.items() if key not in _ADAPTER_IGNORED}
        adapters.append(sent)
    return adapters, list(warnings.values())


def _with_place(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter without a name by the URL or the repository on the hub that is its path."""
    if not sent.keys() & {"id", "url", "hub", *_ADAPTER_ALIASES.keys() - {"lora_scale"}}:
        for key in ("path", "lora_path"):
            place = adapter_named(sent[key], ()) if isinstance(sent.get(key), str) else {"id": ""}
            if "id" not in place:
                return {**{name: value for name, value in sent.items() if name != key}, **place}
    return dict(sent)


def _decoded(name: str, text: str) -> Any:
    try:
        return strict_json.decode(text.encode("utf-8", "surrogatepass"))
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}", param=name) from error


def _object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _decoded(name, value)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: it must be a JSON object", param=name)
    return value


def _ignored(name: str, reason: str) -> FieldWarning:
    return FieldWarning(param=name, message=f"{name}: ignored; {reason}")
