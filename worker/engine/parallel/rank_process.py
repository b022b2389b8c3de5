"""`python -m worker.engine.parallel.rank_process DESCRIPTOR`: one further rank of a model over several devices.

It loads the model's denoisers and runs the forwards that rank 0, the engine's process, sends to the other end of that
socket. It ends with that process, and when the socket closes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging

from shared.config.model_index import read_index
from shared.config.model_spec import ModelSpec
from shared.runtime.parent_process import end_with_parent
from shared.signature import DENOISERS
from worker.engine.channel import Channel
from worker.engine.device import keep_freed_memory, use_full_float32
from worker.engine.parallel.broadcast import ForwardMessage, receive
from worker.engine.parallel.context_parallel import join_group, split_denoisers
from worker.engine.weights.attention import use_attention


@dataclass(frozen=True)
class RankSetUp:
    """The first message to a rank."""

    spec: ModelSpec
    folder: Path
    rank: int
    device: torch.device
    rendezvous: Path
    torch_threads: int


def main(descriptor: int) -> int:
    """Run until the engine's process closes the socket or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the worker handles them
    end_with_parent(os.getppid())
    channel = Channel(socket.socket(fileno=descriptor))
    set_up: RankSetUp = channel.receive()
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    use_full_float32()
    torch.set_num_threads(set_up.torch_threads)
    if set_up.device.type == "cpu":
        keep_freed_memory()
    denoisers = _load_denoisers(set_up.spec, set_up.folder, set_up.device)
    channel.send(None)
    channel.receive()  # until rank 0 has loaded its part
    join_group(set_up.rank, set_up.spec.devices, set_up.device, set_up.rendezvous)
    split_denoisers(denoisers.values(), set_up.spec.devices, set_up.device)
    channel.send(None)
    while True:
        try:
            message: ForwardMessage = channel.receive()
        except EOFError:  # rank 0 has unloaded the model, or is gone
            return 0
        arguments = receive(message.arguments, set_up.device)
        channel.send(_run(denoisers[message.component], arguments, message.autocast))


def _load_denoisers(spec: ModelSpec, folder: Path, device: torch.device) -> dict[str, Any]:
    """Return the denoisers by component, in the order of all ranks."""
    index = read_index(folder)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    options = {"use_safetensors": True, "variant": spec.variant, "local_files_only": True}
    denoisers = {}
    for name in DENOISERS:
        if index.get(name, (None, None))[1] is not None:
            denoiser_class: Any = getattr(diffusers, index[name][1])
            denoisers[name] = denoiser_class.from_pretrained(folder, subfolder=name, dtype=dtype, **options).to(device)
            if spec.attention is not None:
                use_attention(denoisers[name], spec.attention, device, dtype)
    return denoisers


def _run(denoiser: Any, arguments: Any, autocast: tuple[str, torch.dtype] | None) -> tuple[str, str] | None:
    """Run this rank's part of a forward; return the class and message of its error, None without one."""
    args, kwargs = arguments
    try:
        with torch.inference_mode(), nullcontext() if autocast is None else torch.autocast(autocast[0], autocast[1]):
            denoiser(*args, **kwargs)
    except BaseException as error:  # rank 0 compares it with its own
        return type(error).__name__, str(error)
    return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
