"""Processes of ranks that wait for orders: a line of JSON on their standard input, answered by one on their output."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 120.0
"""Longest wait until all have met."""
GRACE_S = 5.0
"""What the others are given to tell their own trouble when one has told its own."""
TAIL = 4000
"""Characters of a rank's log that are told."""

Answer = dict[str, Any]


class TroubleError(AssertionError):
    """Ranks failed, died or kept silent; they are gone."""


class RankProcesses:
    """The processes of one world, started together.

    They end with whoever started them: their standard input does.

    Args:
        world_size: how many.
        program: of Python, what each runs; it answers one line when it has met the others, then one to each order.
        environment: further variables.
    """

    def __init__(self, world_size: int, program: str, environment: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        port = str(free_port())
        self._processes = [
            self._start(rank, port, [sys.executable, "-c", program], environment or {}) for rank in range(world_size)
        ]
        self._answers(START_S, may_die=False)

    def run(self, order: Mapping[str, Any], *, limit_s: float, may_die: bool = False) -> list[Any]:
        """Give all ranks an order; return each rank's answer.

        Args:
            order: what JSON holds.
            limit_s: longest wait for all answers.
            may_die: take None for the answer of a rank that ends without one.

        Raises:
            TroubleError: if a rank fails, dies or does not answer in time; none is left then.
        """
        line = (json.dumps(order) + "\n").encode()
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it died since: that it gives no answer is told below
                process.stdin.write(line)
                process.stdin.flush()
        return self._answers(limit_s, may_die=may_die)

    def close(self) -> None:
        """Let all end in their own way; kill those that do not."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        until = time.monotonic() + GRACE_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all of them now."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # what it did not read any more
                    pipe.close()
        self._logs.cleanup()

    def _start(
        self, rank: int, port: str, command: list[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        own = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (Path(self._logs.name) / f"{rank}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | own | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def _answers(self, limit_s: float, *, may_die: bool) -> list[Answer | None]:
        """Wait for a line of each rank; when one is in trouble, a little longer for the others, and no more."""
        found: dict[int, Answer | None] = {}
        until = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(found) < self.world_size and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    found[key.data] = json.loads(line) if line else None
                    selector.unregister(key.fileobj)
                if any(self._is_trouble(answer, may_die=may_die) for answer in found.values()):
                    until = min(until, time.monotonic() + GRACE_S)
        missing = self.world_size - len(found)
        if missing or any(self._is_trouble(answer, may_die=may_die) for answer in found.values()):
            raise self._trouble(found, limit_s)
        return [found[rank] for rank in range(self.world_size)]

    def _is_trouble(self, answer: Answer | None, *, may_die: bool) -> bool:
        return not may_die if answer is None else "trouble" in answer

    def _trouble(self, found: Mapping[int, Answer | None], limit_s: float) -> TroubleError:
        """End all, and say of each rank that did not do well what became of it."""
        said = []
        for rank, process in enumerate(self._processes):
            name = f"rank {rank} of {self.world_size}"
            answer = found.get(rank, {"silent": True})
            if answer is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                said.append(f"{name} died with code {process.returncode}; its log ends:\n{self._log(rank)}")
            elif "silent" in answer:
                said.append(f"{name} gave no answer (limit {limit_s:g} s); its log ends:\n{self._log(rank)}")
            elif "trouble" in answer:
                said.append(f"{name} failed:\n{answer['trouble']}")
        self.kill()
        return TroubleError("\n".join(said))

    def _log(self, rank: int) -> str:
        return (Path(self._logs.name) / f"{rank}.log").read_text(errors="replace")[-TAIL:]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
