"""`rlhf doctor`: who holds a port, who may know a password, what the clock, the disk and the GPUs are like."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infra import trackers
from infra.process_record import ProcessRecord
from infra.services import doctor, gpus
from infra.services.doctor import Finding
from infra.services.password import keep_password
from infra.services.ports import free_port
from infra.services.state import ServiceRecord, StackState, write_private
from infra.settings import Settings

LISTENER = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@pytest.fixture
def stranger() -> Iterator[tuple[int, int]]:
    """A program of somebody else's: its port and its process id."""
    program = subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with program:
        assert program.stdout is not None
        yield int(program.stdout.readline()), program.pid
        program.communicate()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    for name in ("RLHF_STORE_URL", "RLHF_S3_ENDPOINT_URL", "RLHF_S3_PORT", "RLHF_PREFECT_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def port_of_server(home: Path, port: int, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Finding:
    """Return what the doctor says of a port that is the usual one of the Prefect server."""
    monkeypatch.setattr(doctor, "PREFECT_PORT", port)
    return next(doctor._ports(Settings(home=home, **settings)))


def runs_here(home: Path, port: int) -> StackState:
    """Have this process pass for the Prefect server of a stack."""
    address = f"http://127.0.0.1:{port}"
    record = ServiceRecord(identity=ProcessRecord.of(os.getpid()), fingerprint="", address=address, log=home)
    state = StackState(ports={"prefect": port}, services={"server": record})
    state.save(home)
    return state


def test_a_stranger_on_the_servers_last_port_is_not_taken_for_the_server(
    home: Path, stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pid = stranger
    StackState(ports={"prefect": port}).save(home)  # as `rlhf down` leaves it
    found = port_of_server(home, port, monkeypatch)
    assert found.verdict == "warning"
    assert found.seen.startswith(f"process {pid} ({sys.executable} -c import socket")
    assert found.seen.endswith(") has it, not the Prefect server")
    assert found.advice == "nothing, or end that program: `rlhf up` gives the Prefect server another port"


def test_a_stranger_on_the_port_that_the_user_set_keeps_the_stack_from_starting(
    home: Path, stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = port_of_server(home, free_port(), monkeypatch, prefect_port=stranger[0])
    assert (found.name, found.verdict) == (f"port {stranger[0]}", "wrong")
    assert found.advice == "end that program, or unset RLHF_PREFECT_PORT: `rlhf up` refuses to start"


def test_the_server_that_has_its_port_is_known_by_its_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        runs_here(home, port)
        assert port_of_server(home, port, monkeypatch) == Finding(f"port {port}", "well", "the Prefect server has it")


def test_a_server_that_runs_elsewhere_is_said_to_stay_there(
    home: Path, stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_here(home, 15001)
    stays = "the Prefect server stays at http://127.0.0.1:15001 while it runs"
    assert port_of_server(home, stranger[0], monkeypatch).advice == f"nothing: {stays}"
    found = port_of_server(home, free_port(), monkeypatch)
    assert (found.seen, found.advice) == ("free", f"{stays}; it comes here after `rlhf down` and `rlhf up`")


def test_a_password_that_others_may_know_is_wrong_wherever_it_stands(home: Path) -> None:
    assert list(doctor._password(Settings(home=home))) == [], "there is no stack"
    kept, env = home / "prefect.password", home / ".env"
    keep_password(home, "rlhf:secret")
    env.write_text("PREFECT_API_AUTH_STRING='rlhf:secret'\n")
    env.chmod(0o600)
    [finding] = doctor._password(Settings(home=home))
    assert finding == Finding("password", "well", f"in {kept}, for your eyes alone")
    env.chmod(0o604)
    [finding] = doctor._password(Settings(home=home))
    assert (finding.verdict, finding.seen) == (
        "wrong",
        f"{env} holds it and can be read by others (its mode is 0604)",
    )
    kept.chmod(0o640)
    [finding] = doctor._password(Settings(home=home))
    assert finding.verdict == "wrong"
    assert finding.seen.startswith(f"{kept} can be read by others (its mode is 0640, not 0600)")


def test_what_else_others_may_know_is_told_with_what_to_do(home: Path) -> None:
    names = ("stack.env", "store.secret", "store.pem")
    for name in names:
        write_private(home / name, "secret")
    assert list(doctor._secrets(Settings(home=home))) == []
    for name in names:
        (home / name).chmod(0o604)
    found = list(doctor._secrets(Settings(home=home)))
    assert [(each.name, each.verdict) for each in found] == [(name, "wrong") for name in names]
    assert found[0].seen == f"{home / 'stack.env'} can be read by others (its mode is 0604, not 0600)"


def test_a_password_file_that_is_lost_beside_a_stack_is_told(home: Path) -> None:
    runs_here(home, 15001)
    [finding] = doctor._password(Settings(home=home))
    assert (finding.verdict, finding.advice) == ("warning", "run `rlhf up`, which writes it again")


def test_an_exported_password_that_is_not_the_stacks_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    runs_here(home, 15001)
    (home / "stack.env").write_text("PREFECT_API_URL='http://127.0.0.1:15001/api'\nPREFECT_API_AUTH_STRING='a:b'\n")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "a:b")
    assert list(doctor._environment(Settings(home=home))) == []
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "hunter:2")
    [finding] = doctor._environment(Settings(home=home))
    assert finding.seen == "PREFECT_API_AUTH_STRING is exported, and is not the password of the stack's server"


class Elsewhere(BaseHTTPRequestHandler):
    """A server whose clock is some seconds behind ours, and that lets nobody in."""

    behind_s = 0

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send_error(403)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) - self.behind_s)


@pytest.mark.parametrize(
    ("behind_s", "verdict", "seen"),
    [
        (0, "well", "), in agreement with the artifact store"),
        (60, "warning", "): 60 s ahead of that of the artifact store"),
        (-3600, "wrong", "): 3600 s behind that of the artifact store"),
    ],
)
def test_a_clock_that_is_not_the_stores_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, behind_s: int, verdict: str, seen: str
) -> None:
    monkeypatch.setattr(Elsewhere, "behind_s", behind_s)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        [found] = doctor._clock(Settings(home=home, store_url="s3://bucket", s3_endpoint_url=address))
        server.shutdown()
    assert found.verdict == verdict
    assert re.sub(r"\b(59|61) s", "60 s", re.sub(r"\b(3599|3601) s", "3600 s", found.seen)).endswith(seen)


def test_the_parts_of_the_home_are_told_by_size_and_a_file_with_two_names_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("cache", "store"):
        (home / part / "inside").mkdir(parents=True)
    (home / "store" / "inside" / "a").write_bytes(b"a" * (110 << 20))
    os.link(home / "store" / "inside" / "a", home / "store" / "b")
    (home / "cache" / "inside" / "c").write_bytes(b"c" * (60 << 20))
    [found] = doctor._growth(Settings(home=home))
    assert found == Finding("growth", "well", f"{home} has 0.2 GiB (store 0.1, cache 0.1)")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    [found] = doctor._growth(Settings(home=home))
    assert found.verdict == "warning"
    assert found.advice.startswith("as much again does not fit")


NVIDIA_SMI = """#!/bin/sh
test "$*" = "-q -x" || exit 2
cat <<END
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
<driver_version>550.54.15</driver_version>
<cuda_version>12.4</cuda_version>
<gpu id="00000000:41:00.0">
<product_name>NVIDIA H100</product_name>
<fb_memory_usage><total>81920 MiB</total><reserved>500 MiB</reserved><used>40960 MiB</used></fb_memory_usage>
<processes><process_info><pid>{pid}</pid><used_memory>40448 MiB</used_memory></process_info></processes>
</gpu>
<gpu id="00000000:42:00.0">
<product_name>NVIDIA H100</product_name>
<fb_memory_usage><total>81920 MiB</total><reserved>500 MiB</reserved><used>1 MiB</used></fb_memory_usage>
<processes></processes>
</gpu>
</nvidia_smi_log>
END
"""


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, the first of which this process uses, as the driver's own program tells of them."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI.format(pid=os.getpid()))
    program.chmod(0o755)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "dev")


@pytest.mark.usefixtures("gpu_machine")
@pytest.mark.parametrize(
    ("built", "verdict", "seen"),
    [
        ("12.8", "well", "driver 550.54.15 for CUDA up to 12.4, torch for CUDA 12.8"),
        ("13.0", "wrong", "driver 550.54.15 for CUDA up to 12.4, torch for CUDA 13.0"),
        (None, "warning", "driver 550.54.15 for CUDA up to 12.4, torch for CPUs"),
    ],
)
def test_a_driver_that_does_not_run_torchs_cuda_is_wrong(
    home: Path, monkeypatch: pytest.MonkeyPatch, built: str | None, verdict: str, seen: str
) -> None:
    monkeypatch.setattr(gpus, "cuda_of_torch", lambda: built)
    found = next(doctor._gpus(Settings(home=home)))
    assert (found.name, found.verdict, found.seen) == ("GPU driver", verdict, seen)


@pytest.mark.usefixtures("gpu_machine")
def test_memory_of_a_gpu_that_others_have_is_told_with_who_has_it(home: Path) -> None:
    _, first, second = doctor._gpus(Settings(home=home))
    assert (first.name, first.verdict) == ("GPU 0", "warning")
    who = f"not by this stack but by process {os.getpid()} ("
    assert first.seen.startswith(f"NVIDIA H100: 40.0 GiB of 80.0 are used, {who}")
    assert second == Finding("GPU 1", "well", "NVIDIA H100: 0.0 GiB of 80.0 are used")


def test_a_machine_without_a_gpu_is_told_nothing_of_gpus(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    assert list(doctor._gpus(Settings(home=home))) == []


def test_the_cuda_of_torch_is_what_torch_says_without_its_import() -> None:
    code = "import sys; from infra.services.gpus import cuda_of_torch; print(cuda_of_torch(), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == f"{torch.version.cuda} False\n"


def test_a_retention_that_cannot_be_read_is_told_before_a_night_ends_of_it(home: Path) -> None:
    [found] = doctor._retention(Settings(home=home, retention="policy=50"))
    assert found.seen == "newest versions kept: ppo-state=2, policy=50, and all of other kinds; cache: 50 GB at most"
    [found] = doctor._retention(Settings(home=home, retention="policies=50"))
    assert found.verdict == "wrong"


@pytest.mark.parametrize(
    ("named", "variables", "verdict", "seen"),
    [
        ("mlfow", {}, "wrong", "did you mean mlflow?"),
        ("tensorboard", {}, "well", "trackers/tensorboard"),
        ("tensorboard wandb", {"WANDB_BASE_URL": "http://me:hunter22@127.0.0.1:1"}, "warning", "does not answer"),
    ],
)
def test_the_doctor_says_whether_chosen_trackers_can_be_had_and_answer(
    named: str, variables: dict[str, str], verdict: str, seen: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.MODULES, "wandb", "json")  # installed, as far as one can see
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name, value in {"RLHF_TRACKERS": named, **variables}.items():
        monkeypatch.setenv(name, value)
    found = list(doctor._trackers(Settings(home=home)))
    assert len(found) == len(named.split())
    assert found[-1].verdict == verdict
    assert seen in found[-1].seen
    assert "hunter22" not in str(found)


def test_without_trackers_the_doctor_says_nothing_of_them(home: Path) -> None:
    assert list(doctor._trackers(Settings(home=home))) == []
