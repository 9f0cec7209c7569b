"""`prefect deployment run ppo/llama7b --watch`, as users type it every day."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flows.presets import resolve
from infra.services import prefect_api
from rlhf_core.models.memory import machine_memory, required_memory
from tests.integration.local_stack import LocalStack
from tests.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.integration


WHOLE = {"ppo.lora": None}
"""All weights of 7 billion parameters: the overrides that ask for too much."""


def fits_here() -> bool:
    need, machine = required_memory(resolve("llama7b", overrides=WHOLE).ppo, 6_738_415_616), machine_memory()
    return need.total <= (sum(machine.gpus) or machine.ram)


TYPED = ("prefect", "deployment", "run", "ppo/llama7b", "--watch")


@pytest.mark.skipif(fits_here(), reason="this machine trains all weights of Llama 7B")
def test_a_machine_that_cannot_hold_the_model_says_so_within_a_minute(stack: LocalStack) -> None:
    whole = ("-p", f"overrides={json.dumps(WHOLE)}")
    result = stack.type(*TYPED, *whole, cwd=stack.env_file.parent, timeout_s=60)
    assert result.returncode == 1, result.stdout
    found = re.search(r"UUID: (\S+)", result.stdout)
    assert found, result.stdout
    state = prefect_api.call(stack.api_url, "GET", f"/flow_runs/{found[1]}")["state"]
    logged = prefect_api.call(
        stack.api_url, "POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [found[1]]}}, "limit": 200}
    )
    for said in (state["message"], " ".join(line["message"] for line in logged)):
        assert "meta-llama/Llama-2-7b-hf (6.74 billion parameters) needs at least" in said
        assert "but this machine has" in said
        assert "`-p model=PATH`" in said
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.stack
def test_with_a_small_llama_on_disk_it_completes_on_a_cpu(stack: LocalStack, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "small-llama")
    result = stack.type(*TYPED, "-p", f"model={model}", "-p", "episodes=1", cwd=stack.env_file.parent, timeout_s=300)
    assert result.returncode == 0, result.stdout + result.stderr
    listed = stack.type("rlhf", "artifacts", "list", "policy/llama7b")
    assert "policy/llama7b@1" in listed.stdout
