"""Resuming equals not stopping, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ModelError
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from tests.forked import exit_of
from tests.unit.ppo.experience import tiny_experience
from tests.unit.ppo.test_learner import learner

CASES = {
    "full": {"lora": None, "warmup_steps": 3},
    "adapters with dropout": {"lora": LoRAConfig(r=2, dropout=0.3), "warmup_steps": 3, "dtype": "bfloat16"},
}


def build(case: str) -> PPOLearner:
    return learner(train_batch_size=4, micro_batch_size=2, **CASES[case])


def run(ours: PPOLearner, episode: int) -> list[tuple[float, ...]]:
    return [tuple(stats) for stats in learn_episode(ours, tiny_experience(seed=episode), seed=7, episode=episode)]


def save(ours: PPOLearner, directory: Path) -> None:
    tensors, facts = ours.state()
    save_file(tensors, directory / "state.safetensors")
    (directory / "state.json").write_text(json.dumps(facts))


def load(ours: PPOLearner, directory: Path) -> None:
    ours.load_state(load_file(directory / "state.safetensors"), json.loads((directory / "state.json").read_text()))


def resume(case: str, directory: Path) -> None:
    """What the other process does."""
    ours = build(case)
    load(ours, directory)
    stats = run(ours, 1)
    save(ours, directory)
    (directory / "stats.json").write_text(json.dumps(stats))


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_two_steps_saved_and_two_more_in_another_process_equal_four(case: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    straight = build(case)
    run(straight, 0)
    expected = run(straight, 1)
    whole = straight.state()

    torch.manual_seed(11)
    broken_off = build(case)
    run(broken_off, 0)
    save(broken_off, tmp_path)
    assert exit_of(resume, case, tmp_path) == 0

    assert [tuple(step) for step in json.loads((tmp_path / "stats.json").read_text())] == expected
    resumed = load_file(tmp_path / "state.safetensors")
    for name, tensor in whole.tensors.items():
        assert torch.equal(resumed[name], tensor), name
    assert json.loads((tmp_path / "state.json").read_text()) == json.loads(json.dumps(whole.facts))


def test_a_state_holds_no_frozen_weight_and_does_not_follow_the_learner() -> None:
    ours = build("adapters with dropout")
    run(ours, 0)
    tensors, _ = ours.state()
    assert not [name for name in tensors if "base_layer" in name or "embed" in name]
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    run(ours, 1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in tensors.items())


def test_a_state_that_is_no_copy_is_the_learners_own_memory() -> None:
    ours = build("adapters with dropout")
    run(ours, 0)
    copies, own = ours.state().tensors, ours.state(copied=False).tensors
    assert copies.keys() == own.keys()
    assert all(torch.equal(tensor, copies[name]) for name, tensor in own.items())
    assert {each.data_ptr() for each in own.values()} >= {
        each.data_ptr() for each in ours.actor.parameters() if each.requires_grad
    }


def test_a_loaded_state_is_copied_and_not_written_into() -> None:
    first, second = build("full"), build("full")
    run(first, 0)
    tensors, facts = first.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    second.load_state(tensors, facts)
    run(second, 1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in tensors.items())


def test_a_state_before_the_first_step_can_be_loaded() -> None:
    first, second = build("full"), build("full")
    second.load_state(*first.state())
    torch.manual_seed(0)
    expected = run(first, 0)
    torch.manual_seed(0)
    assert run(second, 0) == expected


@pytest.mark.parametrize("lost", ["actor.weights.", "critic.optimizer.exp_avg.", "random.cpu"])
def test_an_incomplete_state_is_refused_and_changes_nothing(lost: str) -> None:
    ours = build("full")
    run(ours, 0)
    tensors, facts = ours.state()
    name = next(name for name in tensors if name.startswith(lost))
    fresh = build("full")
    before = fresh.state().tensors
    with pytest.raises(ModelError, match=r"does not fit the model|is incomplete"):
        fresh.load_state({key: tensor for key, tensor in tensors.items() if key != name}, facts)
    assert all(torch.equal(tensor, before[key]) for key, tensor in fresh.state().tensors.items())


def test_the_state_of_another_configuration_is_refused() -> None:
    with pytest.raises(ModelError, match="does not fit the model"):
        build("full").load_state(*build("adapters with dropout").state())


def changed(ours: PPOLearner, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A state with one thing wrong, near the end of what is read."""
    tensors, facts = ours.state()
    name = next((name for name in tensors if name.startswith(key)), "")
    match key:
        case "critic.optimizer.exp_avg.":
            tensors[name] = torch.zeros(3)
        case "actor.optimizer.step." | "random.cpu":
            tensors[name] = torch.zeros(2)
        case "no facts":
            facts["critic"] = {}
        case "groups":
            facts["critic"]["schedule"]["base_lrs"] = [1.0, 2.0]
    return tensors, facts


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("critic.optimizer.exp_avg.", r"critic's exp_avg of .* has shape \[3\]"),
        ("actor.optimizer.step.", r"actor's step of .* has shape \[2\], expected \[\]"),
        ("random.cpu", "is no state of this torch's generator"),
        ("no facts", "it lacks critic's schedule"),
        ("groups", r"critic's schedule has \[1.0, 2.0\] as base_lrs, expected 1 numbers"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_the_first_weight_changes(key: str, sentence: str) -> None:
    ours = build("full")
    run(ours, 0)
    fresh = build("full")
    before, facts = fresh.state()
    with pytest.raises(ModelError, match=sentence):
        fresh.load_state(*changed(ours, key))
    after = fresh.state()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.tensors.items())
    assert after.facts == facts


def test_a_weight_that_was_never_used_has_no_moments_and_is_none_the_worse() -> None:
    first, second = build("full"), build("full")
    for ours in (first, second):
        ours.actor.register_parameter("unused_expert", torch.nn.Parameter(torch.ones(2)))
        ours._roles["actor"].optimizer.param_groups[0]["params"].append(ours.actor.unused_expert)
    run(first, 0)
    state = first.state()
    assert not [name for name in state.tensors if "exp_avg" in name and "unused_expert" in name]
    second.load_state(*state)
    assert run(second, 1) == run(first, 1)


def test_moments_that_disagree_on_which_weights_were_used_are_refused() -> None:
    ours = build("full")
    run(ours, 0)
    tensors, facts = ours.state()
    name = next(name for name in tensors if name.startswith("actor.optimizer.exp_avg_sq."))
    del tensors[name]
    with pytest.raises(ModelError, match="actor's exp_avg_sq lacks "):
        build("full").load_state(tensors, facts)
