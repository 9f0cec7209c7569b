"""Trainer and makers of a run hold the same models, whichever way weights travel between them."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.presets import resolve
from infra.artifacts.manifest import BASE_FILE
from rlhf_core.config import LoRAConfig, PipelineConfig
from rlhf_core.models.adapters import load_adapters, save_adapters
from rlhf_core.models.base import is_shared
from rlhf_core.models.loading import load_causal_lm, load_tokenizer
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import trunk_of
from rlhf_core.ppo.published_weights import weights_to_publish
from rlhf_core.weights import Publisher, Subscriber
from tasks import models, ppo_models
from tasks.context import Context, actors_context
from tasks.ppo_models import LearnerFactory, MakerFactory, PolicySaver
from tasks.results import Parent, PPORun
from tests.tiny_llama import write_tiny_llama
from tests.unit.ppo.experience import tiny_experience

torch.set_num_threads(1)

SEQUENCES = torch.arange(3, 15).reshape(2, 6)


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    model = write_tiny_llama(tmp_path / "model", initializer_range=0.2)
    RewardModel.from_causal_lm(load_causal_lm(model, "float32")).save_pretrained(tmp_path / "scorer")
    found = {"sft/tiny@1": model, "reward-model/tiny@1": tmp_path / "scorer"}
    for module in (models, ppo_models):
        monkeypatch.setattr(module, "materialise", lambda _context, parent: found[parent.uri])
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    return found


def run_of(directories: dict[str, Path], *, has_base: bool = False, **ppo: Any) -> PPORun:
    config: PipelineConfig = resolve(
        "llama7b",
        model=str(directories["sft/tiny@1"]),
        overrides={
            "ppo.reward": {"verifier": 0.0, "reward_model": 1.0},
            "ppo.rollout_dtype": "float32",
            **{f"ppo.{name}": value for name, value in ppo.items()},
        },
    )
    uris = {"actor": "sft/tiny@1", "reward_model": "reward-model/tiny@1", "dataset": "dataset/none@1"}
    uris |= {"base": uris["actor"]} if has_base else {}
    parents = {name: Parent(uri=uri, digest="0" * 64) for name, uri in uris.items()}
    return PPORun.model_validate(
        {"name": "r", "key": "a" * 64, "preset": "llama7b", "config": config,
         "source_digest": "s", "flow_run": None, **parents}
    )  # fmt: skip


@pytest.mark.parametrize(("adapters_alone", "has_base"), [(False, False), (True, False), (True, True)])
@pytest.mark.integration
def test_a_maker_that_took_the_trainers_weights_computes_what_the_trainer_does(
    directories: dict[str, Path], adapters_alone: bool, has_base: bool
) -> None:
    run = run_of(directories, has_base=has_base, update_lora_weights=adapters_alone, dtype="float32")
    assert run.shares_base == has_base
    learner, maker = LearnerFactory(run)(), MakerFactory(run)()
    assert maker.critic is not None
    with torch.no_grad():
        for role in ("actor", "critic"):
            for name, weight in getattr(learner, role).named_parameters():
                if weight.requires_grad:  # as if it had learnt
                    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 10)
    held = {"actor": maker.actor, "critic": maker.critic}
    subscriber, publisher = Subscriber(lambda: held), Publisher(transport="shared_memory", dtype=torch.float32)
    try:
        config = run.config.ppo
        tensors = list(weights_to_publish(learner, config))
        publication = publisher.publish(tensors, version=1, fully=not adapters_alone)
        assert subscriber.take(publication, timeout_s=10) == 1
    finally:
        subscriber.close()
        publisher.close()
    whole = sum(weight.numel() for weight in maker.actor.parameters())
    sent = sum(tensor.numel() for name, tensor in tensors if name.startswith("actor."))
    assert sent < whole if adapters_alone else sent == whole
    mask = torch.ones_like(SEQUENCES, dtype=torch.bool)
    with torch.no_grad():
        mine, theirs = (
            model(input_ids=SEQUENCES, attention_mask=mask).logits for model in (learner.actor, maker.actor)
        )
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        before = load_causal_lm(directories["sft/tiny@1"], "float32")(input_ids=SEQUENCES).logits
        assert (before - theirs).abs().max() > 0.01
        values = [
            critic.response_values(sequences=SEQUENCES, attention_mask=mask, num_actions=3)
            for critic in (learner.critic, maker.critic)
        ]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factory", [LearnerFactory, MakerFactory])
@pytest.mark.integration
def test_the_store_is_opened_once_for_all_models_of_a_process(
    directories: dict[str, Path], factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Context] = []

    def opens(run: str | None) -> Context:
        opened.append(actors_context(run))
        return opened[-1]

    monkeypatch.setattr(ppo_models, "actors_context", opens)
    factory(run_of(directories, has_base=True, critic_init="reward_model"))()
    assert len(opened) == 1


@pytest.mark.integration
def test_pissas_adapters_are_over_weights_of_their_own_and_end_as_a_whole_model(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    run = run_of(directories, has_base=True, lora={"r": 2, "init": "pissa"}, dtype="float32")
    assert not run.shares_base
    learner, maker = LearnerFactory(run)(), MakerFactory(run)()
    for model in (learner.actor, maker.actor):
        assert not any(is_shared(weight) for weight in model.parameters())
    assert maker.initial_model is not None, "the actor without its adapters is not the reference"
    with learner.exact("actor") as actor, torch.no_grad():
        PolicySaver(run)(actor, tmp_path / "policy")
        start, found = (load_causal_lm(each, "float32") for each in (directories["sft/tiny@1"], tmp_path / "policy"))
        torch.testing.assert_close(found(SEQUENCES).logits, start(SEQUENCES).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.integration
def test_a_finished_policy_is_adapters_over_the_base_or_a_whole_model(
    directories: dict[str, Path], has_base: bool, tmp_path: Path
) -> None:
    """A run of an earlier release, which has no base, ends in the form in which it began."""
    run = run_of(directories, has_base=has_base, update_lora_weights=has_base, dtype="float32")
    learner = LearnerFactory(run)()
    with torch.no_grad():
        for weight in learner.actor.parameters():
            if weight.requires_grad:
                weight.add_(0.05)
        expected = learner.actor(input_ids=SEQUENCES).logits
        with learner.exact("actor") as actor:
            PolicySaver(run)(actor, tmp_path / "policy")
        if not has_base:
            found = load_causal_lm(tmp_path / "policy", "float32")
        else:
            assert run.base is not None
            noted = models.NotedBase(uri=run.base.uri, digest=run.base.digest)
            assert models.NotedBase.model_validate_json((tmp_path / "policy" / BASE_FILE).read_bytes()) == noted
            found = load_causal_lm(directories["sft/tiny@1"], "float32")
            load_adapters(found, tmp_path / "policy")
        torch.testing.assert_close(found(input_ids=SEQUENCES).logits, expected, rtol=1e-4, atol=1e-4)
    assert load_tokenizer(tmp_path / "policy")


def own_bytes() -> int:
    """Return the memory that this process uses and has to itself; pages of files that it maps are not among it."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would be used again, unseen
    [line] = [
        line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Anonymous:")
    ]
    return 1024 * int(line.split()[1])


@pytest.mark.integration
def test_trainer_and_makers_own_adapters_and_heads_however_large_the_base_is(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    large = write_tiny_llama(tmp_path / "large", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    whole = sum(weight.nbytes for weight in load_causal_lm(large, "float32").parameters())
    assert whole > 100 * 10**6
    no_scorer = {"reward": {"verifier": 1.0, "reward_model": 0.0}, "lora": {"r": 4}, "dtype": "float32"}
    built: list[Any] = [MakerFactory(run_of(directories, **no_scorer))()]  # what is imported is there from here on
    directories["sft/tiny@1"] = large
    grew = []
    for factory in (LearnerFactory, MakerFactory, MakerFactory):
        before = own_bytes()
        built.append(factory(run_of(directories, has_base=True, **no_scorer))())
        grew.append(own_bytes() - before)
    assert max(grew) < 0.2 * whole, grew
    before = own_bytes()
    built.append(torch.ones(whole, dtype=torch.uint8))
    assert own_bytes() - before > 0.9 * whole  # one model more would be seen


@pytest.mark.integration
def test_learning_over_a_base_of_16_bits_is_finite_and_changes_nothing_but_adapters_and_heads(
    directories: dict[str, Path],
) -> None:
    run = run_of(
        directories, has_base=True, dtype="bfloat16", rollout_dtype="bfloat16", gradient_checkpointing=True,
        micro_batch_size=2, train_batch_size=4, reward={"verifier": 1.0, "reward_model": 0.0},
    )  # fmt: skip
    learner = LearnerFactory(run)()
    for role in ("actor", "critic"):
        dtypes = {"lora_" in name or "head" in name: set() for name, _ in getattr(learner, role).named_parameters()}
        for name, weight in getattr(learner, role).named_parameters():
            dtypes["lora_" in name or "head" in name].add((weight.dtype, weight.requires_grad))
        assert dtypes == {True: {(torch.float32, True)}, False: {(torch.bfloat16, False)}}
    before = {name: weight.clone() for name, weight in learner.actor.named_parameters()}
    experience = tiny_experience()
    stats = learner.training_step(learner.recompute(experience))
    assert all(math.isfinite(value) for value in stats if isinstance(value, float))
    changed = {name for name, weight in learner.actor.named_parameters() if not torch.equal(weight, before[name])}
    assert changed
    assert all(".default." in name for name in changed)


@pytest.fixture
def adapted(directories: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """An SFT model and a reward model of adapters, over a base of 16 bits; returns what a run says of them."""
    model = load_causal_lm(directories["sft/tiny@1"], "bfloat16")
    model.save_pretrained(tmp_path / "narrow")
    load_tokenizer(directories["sft/tiny@1"]).save_pretrained(tmp_path / "narrow")
    base = Parent(uri="sft/narrow@1", digest="1" * 64)
    directories[base.uri] = tmp_path / "narrow"
    policy, scorer = (load_causal_lm(tmp_path / "narrow", "bfloat16") for _ in range(2))
    attach_lora(policy, LoRAConfig(r=2), seed=3)
    reward_model = RewardModel(trunk_of(scorer))
    attach_lora(reward_model.trunk, LoRAConfig(r=2), seed=4)
    with torch.no_grad():
        for weight in (*policy.parameters(), *reward_model.trunk.parameters()):
            if weight.requires_grad:
                weight.add_(0.02)
    save_adapters(policy, tmp_path / "policy")
    reward_model.save_adapters(tmp_path / "reward-model")
    load_tokenizer(tmp_path / "narrow").save_pretrained(tmp_path / "policy")
    directories |= {"sft/tiny@2": tmp_path / "policy", "reward-model/tiny@2": tmp_path / "reward-model"}
    return {
        "actor": Parent(uri="sft/tiny@2", digest="2" * 64), "base": base,
        "reward_model": Parent(uri="reward-model/tiny@2", digest="3" * 64), "reward_model_base": base,
    }  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_that_starts_from_an_adapted_reward_model_shares_the_base_and_learns(
    directories: dict[str, Path], adapted: dict[str, Any], dtype: str
) -> None:
    settings = {"dtype": dtype, "rollout_dtype": dtype, "critic_init": "reward_model", "micro_batch_size": 4}
    run = run_of(directories, has_base=True, train_batch_size=8, **settings).model_copy(update=adapted)
    learner, maker = LearnerFactory(run)(), MakerFactory(run)()
    for critic in (learner.critic, maker.critic):
        assert sum(is_shared(weight) for weight in critic.parameters()) > 10
    stats = learner.training_step(learner.recompute(tiny_experience()))
    assert math.isfinite(stats.critic_loss)
    assert maker.initial_model is None


@pytest.mark.integration
def test_adapters_that_are_merged_for_a_process_of_its_own_leave_rotary_angles_alone(
    directories: dict[str, Path], adapted: dict[str, Any]
) -> None:
    own = {"update_lora_weights": False, "rollout_dtype": "bfloat16", "critic_init": "reward_model"}
    maker = MakerFactory(run_of(directories, has_base=True, **own).model_copy(update=adapted))()
    assert maker.critic is not None
    expected = load_causal_lm(directories["sft/narrow@1"], "bfloat16").model.rotary_emb.inv_freq
    for trunk in (maker.actor.model, maker.critic.trunk, maker.initial_model.model):
        assert torch.equal(trunk.rotary_emb.inv_freq, expected)
        assert trunk.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
