"""What is learnt where judges fail: what the samples that were judged teach by themselves."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
import torch
from torch import Tensor

from rlhf_core.errors import TrainingError
from rlhf_core.models.lora import trainable_state
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.critic_start import fit_line
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.loop import Collected, Loop
from rlhf_core.ppo.metrics import episode_metrics, step_metrics
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.training.padding import PaddedBatch
from rlhf_core.types import EpisodeControls, Experience, Sample
from tests.unit.ppo.experience import PROMPTS, RESPONSES, tiny_experience
from tests.unit.ppo.test_learner import CONFIG, learner

torch.set_num_threads(1)
JUDGED = [0, 2, 3, 5, 6]
"""Rows that were judged; 1, 4 and 7 abstain."""
NAN = float("nan")


def abstaining(rows: list[int]) -> Experience:
    """Where only these rows were judged; what the others would have been paid is not known."""
    experience = tiny_experience()
    judged = torch.zeros(len(experience), 1, dtype=torch.bool)
    judged[rows] = True
    unknown = {
        name: torch.where(judged, getattr(experience, name), NAN) for name in ("reward", "advantages", "returns")
    }
    return experience.replace(**unknown, action_mask=experience.action_mask & judged)


def gradients(ours: PPOLearner) -> dict[str, Tensor]:
    """A tenth of each, clipped: Adam's first moments after one step."""
    tensors = ours.state().tensors
    return {name: tensor for name, tensor in tensors.items() if ".exp_avg." in name}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """To 1e-5 of each tensor's largest entry."""
    assert found
    assert found.keys() == expected.keys()
    return all((found[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max() for name, tensor in expected.items())


@pytest.mark.parametrize("micro_batch_size", [8, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": "sequence_mean", "entropy_coef": 0.05, "correction": "truncated"},
        {"aggregation": "constant_length", "advantage_estimator": "rloo", "samples_per_prompt": 2},
        {"advantage_estimator": "reinforce_pp"},
    ],
)
def test_a_step_is_that_of_the_judged_samples_alone(changes: dict[str, object], micro_batch_size: int) -> None:
    ours, alone = (learner(**changes, micro_batch_size=size) for size in (micro_batch_size, 8))
    stats = ours.training_step(ours.recompute(abstaining(JUDGED)))
    expected = alone.training_step(alone.recompute(tiny_experience().select(JUDGED)))
    assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert same(gradients(ours), gradients(alone))


def test_a_minibatch_of_which_all_abstain_takes_no_step() -> None:
    ours = learner()
    ours.training_step(ours.recompute(tiny_experience()))  # the optimizers' moments would move the weights now
    before = trainable_state(ours.actor) | trainable_state(ours.critic)
    stats = ours.training_step(ours.recompute(abstaining([])))
    assert stats.skipped == 1.0
    assert all(value == 0 for value in stats._replace(skipped=0.0, actor_lr=0.0, critic_lr=0.0))
    after = trainable_state(ours.actor) | trainable_state(ours.critic)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert ours.steps == 2


def test_demonstrations_are_learnt_where_all_abstain() -> None:
    sequences = torch.tensor([p + r for p, r in zip(PROMPTS[:1], RESPONSES[:1], strict=True)])
    ptx = PaddedBatch(sequences, torch.ones_like(sequences).bool(), torch.ones(1, len(RESPONSES[0])).bool())
    ours = learner(ptx_coef=0.3)
    critic, actor = trainable_state(ours.critic), trainable_state(ours.actor)
    stats = ours.training_step(ours.recompute(abstaining([])), ptx)
    assert stats.skipped == 0
    assert stats.ptx_loss > 0
    assert stats.actor_grad_norm > 0
    assert any(not torch.equal(tensor, actor[name]) for name, tensor in trainable_state(ours.actor).items())
    assert all(torch.equal(tensor, critic[name]) for name, tensor in trainable_state(ours.critic).items())


def test_the_critics_start_is_fitted_to_what_was_judged_and_waits_for_it() -> None:
    every, some = tiny_experience().select(JUDGED), abstaining(JUDGED)
    assert fit_line(some, gamma=0.9, ranks=ALONE) == pytest.approx(fit_line(every, gamma=0.9, ranks=ALONE))
    ours = learner(critic_init="reward_model")
    ours.recompute(abstaining([]))
    assert ours.facts()["value_line"] is None
    ours.recompute(some)
    assert ours.facts()["value_line"] is not None


def sample(row: int, *, score: float = 0.0, kl: float = 0.0, failed: str = "") -> Sample:
    failures = {"verifier": failed} if failed else {}
    return Sample(
        prompt="p", answer="a", response="r", key=f"k{row}", score=score, verifier=score, well_formed=True,
        rm_score=None, kl=kl, length=row + 1, ended=True, raw_scores={} if failed else {"verifier": score},
        parts={"verifier": score}, failures=failures, abstains=bool(failed),
    )  # fmt: skip


MIXED = [
    sample(0, score=1.0, kl=0.5), sample(1, kl=9.0, failed="raised: it raised OSError: no"),
    sample(2, score=0.0, kl=1.5), sample(3, kl=9.0, failed="timed_out: it took longer than 1 s"),
]  # fmt: skip


def test_an_episodes_figures_are_of_what_was_judged_beside_the_share_that_abstained() -> None:
    found = episode_metrics(MIXED, EpisodeControls(0.1), ALONE)
    assert (found["samples"], found["abstained"]) == (4, 0.5)
    assert (found["score"], found["verifier"], found["raw/verifier"], found["kl"]) == (0.5, 0.5, 0.5, 1.0)
    assert found["length"] == 2.0  # of rows 0 and 2: 1 and 3
    assert found["score_std"] == pytest.approx(0.5**0.5)
    assert {name: value for name, value in found.items() if name.startswith("failed/")} == {
        "failed/verifier/raised": 1, "failed/verifier/timed_out": 1,
    }  # fmt: skip
    nobody = episode_metrics([MIXED[1]], EpisodeControls(0.1), ALONE)
    assert (nobody["abstained"], nobody["score"], nobody["verifier_std"]) == (1.0, 0.0, 0.0)


def test_a_steps_means_per_response_are_over_those_that_were_judged() -> None:
    ours = learner()
    rows = ours.recompute(abstaining(JUDGED))
    found = step_metrics(ours.training_step(rows), rows, ALONE)
    assert found["length"] == fmean(len(RESPONSES[row]) for row in JUDGED)


class _Nothing:
    """A learner of which only the samples count."""

    has_begun = False

    def __init__(self) -> None:
        self.position = type("P", (), {"episode": 0})()

    def begin(self, collected: object, samples: object, /) -> None: ...

    def learn(self, _passes: int) -> list[object]:
        return []

    def finish(self) -> None:
        self.position.episode += 1


def test_later_rewards_are_set_by_what_was_judged() -> None:
    controls = RewardControls(CONFIG.model_copy(update={"kl_target": 1.0, "kl_coef": 0.1}), ALONE)
    loop = Loop(_Nothing(), collect=lambda _episode: Collected(None, MIXED), controls=controls)  # type: ignore[arg-type]
    loop.run_episode(1)
    assert controls.state() == {"kl_coef": 0.1, "scores": [2, 0.5, 0.5]}  # KL 1 is the target; scores 1 and 0


def test_above_the_share_the_episode_is_not_learnt_and_the_sentence_says_why() -> None:
    rows = random.Random(0).sample(range(8), 3)
    samples = [sample(row, failed="" if row in rows else "raised: it raised OSError: no judge") for row in range(8)]
    ours = learner()
    before = trainable_state(ours.actor)
    with pytest.raises(TrainingError) as caught:
        learn_episode(ours, abstaining(rows), samples, seed=0, episode=4)
    assert str(caught.value).startswith(
        "5 of 8 samples of episode 5 could not be judged, more than ppo.max_abstained allows (0.5): verifier failed 5 "
        "times (raised 5; first, it raised OSError: no judge); repair"
    )
    assert caught.value.ends_as == "Failed: rewards that abstain"
    assert not caught.value.passes
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainable_state(ours.actor).items())
    learn_episode(learner(max_abstained=0.625), abstaining(rows), samples, seed=0, episode=4)
