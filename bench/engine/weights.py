"""`python -m bench.engine.weights`: memory of quantized weights, and of weights with layerwise casting.

First the weights of published models by format, counted from their shapes, which takes no memory. Then a model of 100
million random parameters, loaded by each format that this machine has, in a process of its own: the memory that the
process grows by, and whether fused rows equal single calls. `--json FILE` saves these figures.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from bench.common import record
from bench.engine import real_shapes, shapes
from shared.config.models_file import Defaults, Limits, ModelSpec
from shared.config.weight_formats import HeldAs, Quantization, StorageDtype
from worker.engine.checks.self_check import run_self_check
from worker.engine.pipelines.loading import load
from worker.engine.weights.requirements import lacking, tensor_bytes

GIB = 2**30
MIB = 2**20
FORMATS: tuple[HeldAs | None, ...] = (None, "torchao-int8", "torchao-fp8", "bitsandbytes-nf4", "float8_e4m3fn")
XXL: Mapping[str, Any] = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "is_gated_act": True}
PUBLISHED: Mapping[str, Callable[[], torch.nn.Module]] = {
    "SDXL": lambda: real_shapes.real_sdxl().unet,
    "SD3 Medium": lambda: real_shapes.real_sd3().transformer,
    "Z-Image": ZImageTransformer2DModel,
    "FLUX.1": lambda: FluxTransformer2DModel(guidance_embeds=True),
    "Wan 2.1 14B, each denoiser of Wan 2.2 A14B": WanTransformer3DModel,
    "Qwen-Image": QwenImageTransformer2DModel,
    "T5-XXL, text encoder of FLUX.1 and SD3": lambda: T5EncoderModel(T5Config(vocab_size=32128, **XXL)),
    "UMT5-XXL, text encoder of Wan": lambda: UMT5EncoderModel(UMT5Config(vocab_size=256384, **XXL)),
}


def published_sizes() -> None:
    """Print the weights of published models as bfloat16, by format, and with layerwise casting to float8."""
    print("| GiB of weights | bfloat16 | int8, fp8 | nf4 | float8, cast |\n|---|---|---|---|---|")
    for name, build in PUBLISHED.items():
        with torch.device("meta"):
            tensors = build().state_dict()
        columns: tuple[HeldAs | None, ...] = (None, "torchao-int8", "bitsandbytes-nf4")
        columns += () if "text encoder" in name else ("float8_e4m3fn",)
        sizes = [sum(tensor_bytes(key, value.shape, 2, one) for key, value in tensors.items()) for one in columns]
        print(f"| {name} | {' | '.join(f'{size / GIB:.1f}' for size in sizes)} |", flush=True)


def a_spec(folder: Path, dtype: str, held_as: HeldAs | None) -> ModelSpec:
    values: dict[str, Any] = {"id": "flux-100m", "source": str(folder), "dtype": dtype}
    if held_as in get_args(StorageDtype):
        values["layerwise_casting"] = held_as
    elif held_as is not None:
        values["quantization"] = Quantization.model_validate({"denoiser": held_as})
    limits = Limits(min_side=64, multiple_of=16)
    return ModelSpec(**values, defaults=Defaults(width=64, height=64, steps=2), limits=limits)


def measure(spec: ModelSpec, device: torch.device) -> dict[str, Any]:
    """Load a model and run its self-check; return the memory by which this process, or its device, has grown."""
    if spec.quantization is not None:
        __import__("torchao.quantization")
    before = _memory(device)
    model = load(spec, Path(spec.source), device)
    run_self_check(model, device)
    grown = _memory(device) - before
    return {"weights": model.nbytes, "grown": grown, "fused": model.solo_reason or "yes"}


def _memory(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def measured_sizes(device: str) -> list[dict[str, Any]]:
    """Print and return what each format measures in a process of its own."""
    results: list[dict[str, Any]] = []
    print("| format | weights, MiB | memory, MiB | relative to its dtype | fused rows are right |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        shapes.save("flux-100m", Path(folder), dtype=torch.bfloat16)
        for dtype in ("float32", "bfloat16"):
            plain: dict[str, Any] = {}
            for held_as in FORMATS:
                spec = a_spec(Path(folder), dtype, held_as)
                fault = None if spec.quantization is None else lacking(spec.quantization, device.partition(":")[0])
                if fault is not None:
                    print(f"{held_as}: {fault}", file=sys.stderr)
                    continue
                found = _in_a_process(spec, device)
                plain = plain or found
                results.append({"dtype": dtype, "format": held_as, **found})
                print(
                    f"| {dtype}, {held_as or 'whole'} | {found['weights'] / MIB:.0f} "
                    f"| {found['grown'] / MIB:.0f} | {found['weights'] / plain['weights']:.2f}, memory "
                    f"{found['grown'] / plain['grown']:.2f} | {found['fused']} |",
                    flush=True,
                )
    return results


def _in_a_process(spec: ModelSpec, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.engine.weights", "--device", device, "--measure", spec.model_dump_json()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", metavar="MODEL", help="measure one model, as JSON; for the processes it starts")
    arguments = parser.parse_args()
    shapes.disable_progress_bars()
    if arguments.measure is not None:
        with torch.no_grad():
            spec = ModelSpec.model_validate_json(arguments.measure)
            print(json.dumps(measure(spec, torch.device(arguments.device))))
        return
    published_sizes()
    print()
    results = measured_sizes(arguments.device)
    if arguments.json:
        record.write(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
