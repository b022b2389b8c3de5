"""`python -m bench.engine.decodes`: memory of decodes, whole, in tiles and in slices.

Two images of 512² by a VAE of the shape of Stable Diffusion's with a quarter of its channels, whose tiles have 256²:
what the process holds above its weights at the peak, relative to the whole decode. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from bench.common import record
from bench.engine.shapes import disable_progress_bars
from shared.config.models_file import ModelSpec
from worker.engine.weights.memory import save_memory

MIB = 2**20
SIDE, ROWS = 512, 2
KEYS: Mapping[str, Mapping[str, bool]] = {
    "neither": {},
    "vae_tiling": {"vae_tiling": True},
    "vae_slicing": {"vae_slicing": True},
    "both": {"vae_tiling": True, "vae_slicing": True},
}


@dataclass(frozen=True)
class DecodeResult:
    """The memory at the peak of a decode above that before it."""

    keys: str
    peak_mib: float


def a_vae() -> AutoencoderKL:
    """Return a VAE; each level of its decoder doubles the sides."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoencoderKL(
            block_out_channels=(32, 64, 128, 128),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            sample_size=SIDE // 2,
        ).eval()


def measure(name: str, keys: Mapping[str, bool]) -> DecodeResult:
    vae = a_vae()
    save_memory({"vae": vae}, ModelSpec(id="vae", source="/none", **keys), torch.float32)  # type: ignore[arg-type]
    latents = torch.randn(ROWS, 4, SIDE // 8, SIDE // 8)
    vae.decode(latents[:, :, :8, :8])
    before = _reset_peak()
    vae.decode(latents)
    return DecodeResult(name, round((_status("VmHWM") - before) / MIB, 1))


def _reset_peak() -> int:
    """Return the memory of this process, and count its peak from now on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bars()
    print("| keys | peak, MiB | relative |\n|---|---|---|")
    results: list[DecodeResult] = []
    for name, keys in KEYS.items():
        results.append(measure(name, keys))
        relative = results[-1].peak_mib / results[0].peak_mib
        print(f"| {name} | {results[-1].peak_mib:.0f} | {relative:.2f} |", flush=True)
    if options.json:
        record.write(options.json, {"results": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
