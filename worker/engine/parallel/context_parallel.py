"""Denoisers split over the ranks of a process group: each rank has a part of the sequence, or a part of the heads.

diffusers' context parallelism by Ulysses. The process group is that of torch.distributed, on this machine only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.hooks import context_parallel as diffusers_hooks
from diffusers.models import _modeling_parallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.architectures.registry import SPLIT_DENOISERS
from shared.signature import denoisers_of

# Of one collective call: the ranks have the same work, so they reach it at about the same time.
COLLECTIVE_TIMEOUT_S = 120.0
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def check_divisible(folder: Path, devices: int) -> None:
    """Raise `ValueError` if a denoiser of the pipeline in `folder` cannot be split over `devices`."""
    for component, name in (denoisers_of(folder) or {}).items():
        if name not in SPLIT_DENOISERS:
            known = ", ".join(sorted(SPLIT_DENOISERS))
            raise ValueError(f"devices = {devices}: {name} cannot be split; remove the key; those that can: {known}")
        heads: int = json.loads((folder / component / "config.json").read_text("utf-8"))["num_attention_heads"]
        if heads % devices:
            raise ValueError(f"devices = {devices}: {name} has {heads} attention heads; use a divisor of {heads}")


def join_group(rank: int, devices: int, device: torch.device, rendezvous: Path) -> None:
    """Make this process a rank of the group that meets at the file `rendezvous`; waits for the others."""
    if dist.is_initialized():
        raise ValueError("devices: another model over several devices is in memory")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _LOOPBACK)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # With both backends diffusers exchanges lengths on the host, and does not wait for the device.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=devices,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def split_denoisers(denoisers: Iterable[Any], devices: int, device: torch.device) -> None:
    """Split the forwards of denoisers over the group; all ranks call it, with the same denoisers."""
    diffusers_hooks._all_gather_anything = _gather  # gloo gathers parts of equal size only
    mesh = init_device_mesh(device.type, (1, devices), mesh_dim_names=("ring", "ulysses"))
    for denoiser in denoisers:
        _split(denoiser, devices, device, mesh)


def _gather(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ranks' parts of a tensor joined along `dim`, where they can differ by one."""
    lengths = _modeling_parallel.gather_size_by_comm(part.shape[dim], group)
    missing = max(lengths) - part.shape[dim]
    padded = F.pad(part, [0, 0] * (part.ndim - 1 - dim) + [0, missing]).contiguous()
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([one.narrow(dim, 0, length) for one, length in zip(parts, lengths, strict=True)], dim)


def _split(denoiser: Any, devices: int, device: torch.device, mesh: DeviceMesh) -> None:
    # "Anything": the lengths of images and prompts need not be multiples of the devices.
    context = _modeling_parallel.ContextParallelConfig(ulysses_degree=devices, ulysses_anything=True)
    config = _modeling_parallel.ParallelConfig(context_parallel_config=context)

    def resolve(_config: Any) -> Any:
        config.setup(dist.get_rank(), devices, device, mesh=mesh)
        denoiser._parallel_config = config
        return config

    # diffusers' own method asks for an accelerator, which a CPU is not, and takes the devices from the first one on.
    denoiser._resolve_parallel_config = resolve
    try:
        denoiser.enable_parallelism(config=config)
    finally:
        del denoiser._resolve_parallel_config
