"""What the NVIDIA driver says of this machine's GPUs, and what torch was built for; neither is loaded for it."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from infra.errors import ServiceError

_DEVICES = Path("/dev")
_PROGRAM = "nvidia-smi"
_MIB = 2**20


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    total_bytes: int
    used_bytes: int
    users: dict[int, int]
    """How much each process has, in bytes; a container does not see those outside, nor perhaps its own."""


class Driver(NamedTuple):
    """The driver and its GPUs."""

    version: str
    cuda: str
    """The latest CUDA that it runs."""
    gpus: list[Gpu]


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA device."""
    return any(_DEVICES.glob("nvidia[0-9]*"))


def read_driver() -> Driver:
    """Return what the driver says.

    Raises:
        ServiceError: if it says nothing.
    """
    try:
        command = [_PROGRAM, "-q", "-x"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=True)
        told = ET.fromstring(done.stdout)
        return Driver(
            _text(told, "driver_version"), _text(told, "cuda_version"), [_gpu(each) for each in told.iter("gpu")]
        )
    except subprocess.CalledProcessError as error:
        said = " ".join(f"{error.stdout} {error.stderr}".split())
        raise ServiceError(f"{_PROGRAM} failed: {said[:200]}") from None
    except (OSError, subprocess.TimeoutExpired, ET.ParseError, ValueError) as error:
        raise ServiceError(f"{_PROGRAM} does not say what there is ({error})") from None


def cuda_of_torch() -> str | None:
    """Return the CUDA that torch was built for; None: it is built for CPUs alone, or is not there."""
    found = find_spec("torch")  # imports nothing: torch takes seconds
    places = found.submodule_search_locations if found else None
    text = Path(places[0], "version.py").read_text(encoding="utf-8") if places else ""
    said = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return said[1] if said else None


def _gpu(told: ET.Element) -> Gpu:
    users = {int(_text(process, "pid")): _bytes(_text(process, "used_memory")) for process in told.iter("process_info")}
    memory = told.find("fb_memory_usage")
    if memory is None:
        raise ValueError("no memory is named")
    return Gpu(_text(told, "product_name"), _bytes(_text(memory, "total")), _bytes(_text(memory, "used")), users)


def _text(told: ET.Element, name: str) -> str:
    return (told.findtext(name) or "").strip()


def _bytes(text: str) -> int:
    """Return what is written as `123 MiB`; nothing where the driver does not tell it."""
    number, _, unit = text.partition(" ")
    return int(number) * _MIB if unit == "MiB" and number.isdecimal() else 0
