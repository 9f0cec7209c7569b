"""The four roles, called in one process without Ray: they learn what `PPOTrainer` does, and write what can be read."""

from __future__ import annotations

import json
import socket
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_core.coati.roles.composition import ExperienceCompositionRefs, ScoreArrays
from rlhf_core.coati.roles.roles import RayPPOActor, RayPPOCritic, RayPPOInitialModel, RayPPORewardModel
from rlhf_core.coati.roles.settings import RoleSettings
from rlhf_core.errors import ConfigError, ModelError, TrainingError
from rlhf_core.rewards.scoring import Scores
from rlhf_core.rollout.experience import token_logprobs
from tests.unit.coati.roles.reference import (
    Reference,
    actor_figures,
    critic_figures,
    flags,
    texts,
    write_inputs,
)


@pytest.fixture(autouse=True)
def references_that_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(references: Sequence[Any], timeout: float) -> list[Any]:
        assert timeout > 0
        return list(references)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda *_, **__: ([], []))


def role(actor: Any, args: Namespace) -> Any:
    made = actor.__ray_metadata__.modified_class(1, 0, 0, None, None)
    made.init_model_from_pretrained(RoleSettings.from_args(args))
    return made


@pytest.mark.parametrize("architecture", ["bloom", "opt"])
def test_the_roles_learn_what_one_trainer_does_and_write_its_policy(architecture: str, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, architecture)
    args = flags(inputs, model=architecture, strategy="plain")
    actor, critic, initial, reward = roles = [
        role(each, args) for each in (RayPPOActor, RayPPOCritic, RayPPOInitialModel, RayPPORewardModel)
    ]
    assert actor.set_prompts([*texts()[:-1], texts()[-1] + " it aloud"]) == 1
    actor.set_prompts(texts())
    steps: list[tuple[Any, Any]] = []
    for number in range(3):
        made = []
        for step in (2 * number, 2 * number + 1):
            drawn = actor.sample_prompts_and_make_sequence(step, number)
            refs = ExperienceCompositionRefs(
                drawn,
                actor.calculate_action_log_probs(drawn),
                initial.calculate_base_action_log_probs(drawn),
                critic.calculate_value(drawn),
                reward.calculate_r(drawn),
            )
            made.append(roles[step % 4].make_experience(refs))
        learnt = (each.learn_on_experiences(made, number) for each in (actor, critic))
        steps += zip(*learnt, strict=True)
    reference = Reference(inputs)
    expected = reference.fit(texts())
    assert len(expected) == 12
    assert actor_figures([mine for mine, _ in steps]) == actor_figures(expected)
    assert critic_figures([hers for _, hers in steps]) == critic_figures(expected)

    assert actor.save_checkpoint(str(tmp_path / "p.pt"), True) == [
        str(tmp_path / f"p{end}.pt") for end in ("", ".optim")
    ]
    assert actor.save_checkpoint(str(tmp_path / "whole"), False) == [str(tmp_path / "whole")]
    weights, whole = load_file(tmp_path / "p.pt"), AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    for name, weight in reference.trainer.learner.actor.named_parameters():
        assert torch.equal(weights[name], weight), name
        assert torch.equal(dict(whole.named_parameters())[name], weight), name
    assert not list(tmp_path.glob("*.new"))
    assert {span.what for span in actor.spans()} == {"load", "generate", "log-probs", "assemble", "learn", "save"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
@pytest.mark.parametrize("name", ["p.pt", "whole"])
def test_a_policy_that_the_disk_does_not_take_is_told_with_path_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    actor = role(RayPPOActor, flags(write_inputs(tmp_path, "gpt2"), strategy="plain"))
    monkeypatch.setattr(actor._strategy, "save_model", fail)
    monkeypatch.setattr(actor._strategy, "save_pretrained", fail)
    place = f"{tmp_path / name} on {socket.gethostname()}"
    with pytest.raises(TrainingError, match=f"the trained policy could not be written to {place} .*(No space|I/O)"):
        actor.save_checkpoint(str(tmp_path / name), False)


def test_the_machine_that_writes_the_policy_tries_it_before_it_loads_anything(tmp_path: Path) -> None:
    args = flags(write_inputs(tmp_path, "gpt2"), strategy="plain", save_path=tmp_path / "prompts.csv" / "p.pt")
    with pytest.raises(ConfigError, match=f"{socket.gethostname()}, which writes the policy at the end, cannot do so"):
        role(RayPPOActor, args)
    role(RayPPOCritic, args)
    role(RayPPOActor, flags(tmp_path, strategy="plain", save_path=tmp_path / "new" / "p.pt"))
    assert list((tmp_path / "new").iterdir()) == []


def test_without_a_reward_model_an_untrained_head_scores_the_same_each_time(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, "gpt2")
    args = flags(inputs, rm_pretrain=None, strategy="plain")
    actor = role(RayPPOActor, args)
    actor.set_prompts(texts())
    drawn = actor.sample_prompts_and_make_sequence(0, 0)
    first, second = (role(RayPPORewardModel, args).calculate_r(drawn) for _ in range(2))
    assert first.total.tolist() == second.total.tolist()
    assert len(set(first.total.tolist())) > 1


def test_an_actor_that_draws_from_all_tokens_in_float32_has_noted_what_it_thinks_of_them(tmp_path: Path) -> None:
    actor = role(RayPPOActor, flags(write_inputs(tmp_path, "gpt2"), strategy="plain", top_k=0))
    actor.set_prompts(texts())
    drawn = actor.sample_prompts_and_make_sequence(0, 0)
    noted = actor.calculate_action_log_probs(drawn)
    assert (noted == drawn.rollout_log_probs).all()
    read = token_logprobs(actor._plain, drawn.batch(), temperature=1.0, config=actor._config)
    torch.testing.assert_close(torch.tensor(noted), read, rtol=0, atol=1e-5)


def test_a_directory_without_a_reward_model_is_refused(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, "gpt2")
    with pytest.raises(
        ModelError, match=r"--rm_pretrain .*policy holds no reward model, as it has no head\.safetensors"
    ):
        role(RayPPORewardModel, flags(inputs, rm_pretrain=inputs / "policy"))


def test_scores_that_are_no_numbers_are_not_learnt_from(tmp_path: Path) -> None:
    args = flags(write_inputs(tmp_path, "gpt2"), strategy="plain")
    actor = role(RayPPOActor, args)
    actor.set_prompts(texts())
    drawn = actor.sample_prompts_and_make_sequence(0, 0)
    own = actor.calculate_action_log_probs(drawn)
    wrong = torch.full((2,), float("nan"))
    scores = ScoreArrays.of(Scores(wrong, {}, {}, None, torch.zeros(2).bool(), [{}, {}]))
    made = actor.make_experience(ExperienceCompositionRefs(drawn, own, own, 0 * own, scores))
    says = r"the reward of 2 of 2 responses is not a finite number.*kept in .*failed-batch-round-1/actor-0$"
    with pytest.raises(TrainingError, match=says) as raised:
        actor.learn_on_experiences([made], 0)
    kept = Path(str(raised.value).rsplit(" kept in ", 1)[1])
    assert kept.is_relative_to(tmp_path)
    tensors = load_file(kept / "experience.safetensors")
    assert torch.equal(tensors["sequences"], made.unpacked()[0].sequences)
    assert tensors["reward"].isnan().any(dim=1).all()
    assert "is not a finite number" in json.loads((kept / "batch.json").read_text())["error"]


def test_scores_come_out_as_they_went_in() -> None:
    abstains, failures = torch.tensor([False, True]), [{}, {"a": "died: it ended its process (SIGKILL)"}]
    formed = torch.tensor([True, False])
    scores = Scores(torch.ones(2), {"a": torch.zeros(2)}, {"a": torch.ones(2)}, formed, abstains, failures)
    found = ScoreArrays.of(scores).unpacked()
    assert torch.equal(found.total, scores.total)
    assert torch.equal(found.raw["a"], scores.raw["a"])
    assert torch.equal(found.parts["a"], scores.parts["a"])
    assert found.well_formed is not None
    assert found.well_formed.tolist() == [True, False]
    assert torch.equal(found.abstains, abstains)
    assert found.failures == failures
