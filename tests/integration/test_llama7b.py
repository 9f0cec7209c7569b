"""`prefect deployment run ppo/llama7b --watch`, as users type it every day."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from flows.presets import resolve
from infra.services import prefect_api
from rlhf_core.models.adapters import BELOW, WEIGHTS_FILE
from rlhf_core.models.memory import machine_memory, required_memory
from tests.integration.local_stack import LocalStack
from tests.integration.test_chain import small
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


@pytest.mark.stack
def test_a_chain_of_adapters_stores_the_base_nowhere_and_its_models_load_elsewhere(
    stack: LocalStack, tmp_path: Path
) -> None:
    """SFT, reward model and policy over one base that lies outside the store."""
    model = write_tiny_llama(tmp_path / "small-llama")
    pairs = tmp_path / "pairs.jsonl"  # the model is never right, so its samples would make none
    rows = [{"prompt": f"Sort {n} and 1", "chosen": f"1, {n}", "rejected": f"{n}, 1"} for n in range(2, 30)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lora = {"sft.lora": {"r": 16}, "reward_model.lora": {"r": 4}, "ppo.critic_init": "reward_model"}
    rewards = {"ppo.reward": {"verifier": 1.0, "reward_model": 0.1}, "data.preferences": str(pairs)}
    overrides = small(**lora, **rewards, **{"sft.epochs": 1})
    typed = ["rlhf", "run", "quickstart", "-p", f"model={model}", "-p", "episodes=2"]
    result = stack.type(*typed, "-p", f"overrides={json.dumps(overrides)}", timeout_s=400)
    assert result.returncode == 0, result.stdout + result.stderr
    store = stack.store(tmp_path / "cache")
    for kind in ("sft", "reward-model", "policy"):
        manifest = store.resolve(f"{kind}/quickstart")
        assert manifest.has_adapters
        assert "model/small-llama" in {parent.uri for parent in manifest.parents}
        assert not [each.path for each in manifest.files if each.path.startswith("model")]
    sft = store.resolve("sft/quickstart")
    for kind in ("policy", "reward-model"):
        below = store.resolve(f"{kind}/quickstart").entry(f"{BELOW}/{WEIGHTS_FILE}")
        assert below.sha256 == sft.entry(WEIGHTS_FILE).sha256  # stored once
    kept = {path.parent.name + path.name for path in (stack.home / "cache" / "artifacts" / "files").rglob("*")}
    assert sft.entry(WEIGHTS_FILE).sha256 in kept
    assert store.resolve("policy/quickstart").entry(WEIGHTS_FILE).sha256 not in kept  # evaluated once
    for form, loader in (("joined", AutoPeftModelForCausalLM), ("merged", AutoModelForCausalLM)):
        whole = ["--merged"] if form == "merged" else []
        fetched = stack.type("rlhf", "artifacts", "fetch", "policy/quickstart", str(tmp_path / form), *whole)
        assert fetched.returncode == 0, fetched.stderr
        loaded = loader.from_pretrained(tmp_path / form)
        assert loaded(input_ids=torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    again = stack.type("rlhf", "artifacts", "fetch", "policy/quickstart", str(tmp_path / "joined"))
    assert again.returncode == 1
    assert "is not an empty directory; give an empty" in again.stderr
    (tmp_path / "small-llama").rename(tmp_path / "moved")
    there = ["rlhf", "artifacts", "fetch", "policy/quickstart"]
    gone = stack.type(*there, str(tmp_path / "elsewhere"))
    assert gone.returncode == 1
    assert "which the store does not hold: model" in gone.stderr
    found = stack.type(*there, str(tmp_path / "found"), "--merged", "--model", str(tmp_path / "moved"))
    assert found.returncode == 0, found.stderr
    write_tiny_llama(tmp_path / "small-llama", initializer_range=0.3)
    changed = stack.type("rlhf", "artifacts", "fetch", "policy/quickstart", str(tmp_path / "elsewhere"))
    assert changed.returncode == 1
    assert "holds another model by now" in changed.stderr
    (tmp_path / "small-llama").rename(tmp_path / "other")
    (tmp_path / "moved").rename(tmp_path / "small-llama")
    assert stack.type("rlhf", "artifacts", "verify").returncode == 0
