"""Rank 0 of a model over several devices: starts the other ranks, sends them each forward, and runs its own part."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

from shared.config.model_spec import ModelSpec
from shared.runtime.python_command import python_command
from worker.engine.channel import Channel
from worker.engine.device import device_of_rank
from worker.engine.errors import RankLost
from worker.engine.parallel.broadcast import ForwardMessage, describe, send
from worker.engine.parallel.context_parallel import join_group, leave_group, split_denoisers
from worker.engine.parallel.rank_process import RankSetUp

log = structlog.get_logger()

END_TIMEOUT_S = 5.0
# Within which ranks fail at the same operation; one that fails by itself leaves the others in a collective call.
SKEW_S = 10.0


class RankGroup:
    """The other ranks of one model. They start at once and load the denoisers while rank 0 loads the model.

    `lost` is why they are of no use any more, None while they are; any thread can read it.
    """

    def __init__(self, spec: ModelSpec, folder: Path, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self.lost: str | None = None
        self._closing = False
        devices = [device_of_rank(rank, spec.devices, device) for rank in range(spec.devices)]
        self._folder = tempfile.TemporaryDirectory(prefix="fusequeue-ranks-")  # only its owner can enter it
        self._rendezvous = Path(self._folder.name) / "rendezvous"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        for rank in range(1, spec.devices):
            threads = torch.get_num_threads()
            self._start(RankSetUp(spec, folder, rank, devices[rank], self._rendezvous, threads))

    def _start(self, set_up: RankSetUp) -> None:
        local, remote = socket.socketpair()
        with remote:
            command = python_command("worker.engine.parallel.rank_process", str(remote.fileno()))
            # Ctrl-C in a terminal must reach only the worker.
            process = subprocess.Popen(command, pass_fds=[remote.fileno()], process_group=0)
        self._processes.append(process)
        self._channels.append(Channel(local))
        with contextlib.suppress(OSError):  # of a rank that has ended, which `join` reports
            self._channels[-1].send(set_up)
        threading.Thread(target=self._watch, args=(process, set_up.rank), name="rank-watch", daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        status = process.wait()
        if not self._closing:
            self.lost = f"rank {rank} of model {self._spec.id!r} ended with status {status}"
            log.error("rank_ended", model=self._spec.id, rank=rank, status=status)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self, denoisers: Mapping[str, torch.nn.Module]) -> None:
        """Form the group and split the denoisers over it; raises `ValueError` if a rank has ended."""
        try:
            self._receive()
            for channel in self._channels:
                channel.send("join")
            join_group(0, self._spec.devices, self._device, self._rendezvous)
            split_denoisers(denoisers.values(), self._spec.devices, self._device)
            self._receive()
        except (EOFError, OSError):
            raise ValueError(f"devices = {self._spec.devices}: a rank ended while it loaded; see the log") from None

    def _receive(self) -> list[Any]:
        return [channel.receive() for channel in self._channels]

    def run(self, component: str, denoiser: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a forward of a denoiser on all ranks and return its output; raises its error if all ranks had it."""
        if self.lost is not None:
            raise RankLost(self.lost)
        output, error = None, None
        try:
            self._announce(component, (args, kwargs))
            try:
                output = denoiser(*args, **kwargs)
            except BaseException as raised:  # a model's code can raise anything
                error = raised
            outcomes = self._receive() if error is None else self._failures()
        except (EOFError, OSError, RuntimeError) as failure:  # RuntimeError: of the group's connections
            raise RankLost(self._fail(f"a rank cannot be reached: {failure!r}")) from None
        if any(not _same(error, outcome) for outcome in outcomes):
            raise RankLost(self._fail(f"rank 0: {error!r}, others: {outcomes}")) from None
        if error is not None:
            raise error
        return output

    def _failures(self) -> list[Any]:
        """Return how a forward that failed in this process ended on the others; "still running" after a while."""
        return [
            channel.receive() if channel.has_message(SKEW_S) else ("", "still running") for channel in self._channels
        ]

    def _announce(self, component: str, arguments: Any) -> None:
        tensors: list[torch.Tensor] = []
        kind = self._device.type
        autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        message = ForwardMessage(component, describe(arguments, tensors), autocast)
        for channel in self._channels:
            channel.send(message)
        send(tensors)

    def _fail(self, reason: str) -> str:
        self.lost = self.lost or f"a forward of model {self._spec.id!r} failed on some ranks: {reason}"
        return self.lost

    def close(self) -> None:
        """End the other ranks."""
        self._closing = True
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
            process.kill()
            process.wait()
        leave_group()
        self._folder.cleanup()


def _same(error: BaseException | None, outcome: tuple[str, str] | None) -> bool:
    """Return whether another rank's forward ended like that of rank 0; then all stopped at the same operation."""
    if error is None or outcome is None:
        return error is None and outcome is None
    name, text = outcome
    # The message of an error of memory has the device's figures.
    return type(error).__name__ == name and (isinstance(error, torch.OutOfMemoryError) or str(error) == text)
