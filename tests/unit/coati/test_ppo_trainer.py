"""The public trainer: its loop, its modes, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.coati.callbacks import Callback
from rlhf_core.config import PPOOptions
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.order import episode_windows
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.types import Experience
from tests.tiny_llama import tiny_llama
from tests.unit.coati.ppo_trainers import (
    OPTIONS,
    demonstrations,
    encoded,
    metrics,
    padded,
    prompts,
    record_stats,
    trainer,
)


class Recorder(Callback):
    """Writes down which hook was called, with what."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.learnt: list[Experience] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(*arguments: Any) -> None:
            if name == "on_learn_batch_end":
                self.learnt.append(arguments[0])
            shown = [len(each) if isinstance(each, Experience) else each for each in arguments]
            self.calls.append(f"{name[3:]}({', '.join(map(str, shown))})")

        return hook


def test_the_hooks_are_called_as_the_loop_goes() -> None:
    recorder = Recorder()
    trainer(callbacks=(recorder,)).fit(1, 2, 2, prompts())
    assert recorder.calls == [
        "fit_start()", "episode_start(0)",
        "make_experience_start()", "make_experience_end(2)", "make_experience_start()", "make_experience_end(2)",
        "learn_epoch_start(0)", "learn_batch_start()", "learn_batch_end(2)",
        "learn_batch_start()", "learn_batch_end(2)", "learn_epoch_end(0)",
        "learn_epoch_start(1)", "learn_batch_start()", "learn_batch_end(2)",
        "learn_batch_start()", "learn_batch_end(2)", "learn_epoch_end(1)",
        "episode_end(0)", "fit_end()",
    ]  # fmt: skip


def test_an_error_ends_episode_and_fit_for_the_callbacks_too_and_the_next_fit_collects_anew() -> None:
    class Fails(Recorder):
        fail = True

    recorder = Fails()
    ours = trainer(callbacks=(recorder,))
    make = ours.experience_maker.make_experience
    ours.experience_maker.make_experience = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        ours.fit(1, 2, 1, prompts())
    assert recorder.calls[-2:] == ["episode_end(0)", "fit_end()"]
    ours.experience_maker.make_experience = make  # type: ignore[method-assign]
    ours.fit(1, 2, 1, prompts())
    assert ours.position.step == 2  # four rows, not more, in batches of two


@pytest.mark.parametrize("sampled", [False, True])
def test_steps_learn_from_the_windows_of_the_common_order(sampled: bool) -> None:
    recorder = Recorder()
    ours = trainer(callbacks=(recorder,), accumulation_steps=2, sample_buffer=sampled, seed=5)
    ours.fit(1, 3, 3, prompts())  # six rows; in order nine batches in five steps, at random three in two
    expected = episode_windows(
        seed=5, episode=0, passes=3, samples=6, batch_size=2, accumulation_steps=2, sampled=sampled
    )
    assert [len(rows) for rows in recorder.learnt] == [len(window.rows) for window in expected]
    assert len(recorder.learnt) == ours.position.step == (2 if sampled else 5)
    if not sampled:
        first, second = recorder.learnt[0].sequences, recorder.learnt[1].sequences[:2]
        assert (
            len({tuple(row) for row in torch.cat([first, second]).tolist()}) == 6
        )  # the first pass sees each row once


def test_two_accumulated_batches_are_one_batch_of_twice_the_size() -> None:
    runs = []
    for size, steps in ((4, 1), (2, 2)):
        ours = trainer(train_batch_size=size, accumulation_steps=steps)
        stats = record_stats(ours)
        torch.manual_seed(0)
        ours.fit(2, 2, 1, prompts())
        assert len(stats) == 2
        runs.append(stats)
    for whole, pieces in zip(*runs, strict=True):
        assert pieces._asdict() == pytest.approx(whole._asdict(), rel=2e-3, abs=1e-5)
    # Before the first step, nothing but the order of sums differs.
    whole, pieces = (run[0] for run in runs)
    assert (pieces.actor_grad_norm, pieces.critic_grad_norm) == pytest.approx(
        (whole.actor_grad_norm, whole.critic_grad_norm), rel=1e-5
    )


def test_a_prompt_that_comes_again_is_sampled_with_other_noise_and_the_same_seed_repeats_the_run() -> None:
    batch = padded(encoded(["2 plus 2"] * 3))

    def responses(seed: int) -> list[tuple[int, ...]]:
        recorder = Recorder()
        trainer(callbacks=(recorder,), seed=seed, train_batch_size=6).fit(1, 2, 1, [batch])
        return sorted(tuple(row) for row in recorder.learnt[0].sequences.tolist())

    first = responses(0)
    assert len(set(first)) == 6
    assert responses(0) == first != responses(1)


def test_schedules_are_stepped_once_for_each_optimizer_step() -> None:
    ours = trainer(accumulation_steps=2)
    ours.fit(1, 2, 4, prompts())  # eight batches: four steps
    for role in ("actor", "critic"):
        rates = ours.checkpoints._roles[role].scheduler.get_last_lr()
        assert rates == pytest.approx([1e-3 / 1.4])


def test_metrics_have_coatis_names_and_a_sample_of_text_is_shown_in_every_episode(tmp_path: Path) -> None:
    ours = trainer()
    ours.fit(2, 1, 1, prompts(), log_dir=tmp_path)
    lines = metrics(tmp_path)
    step = next(line for line in lines if line["step"] == 2 and "train/reward" in line)
    names = "actor_loss critic_loss max_ratio skip_ratio reward value advantages kl ptx_loss lr_actor lr_critic"
    more = "length clip_fraction explained_variance entropy actor_grad_norm critic_grad_norm"
    assert {f"train/{name}" for name in f"{names} {more}".split()} <= step.keys()
    episode = next(line for line in lines if line["step"] == 1 and "episode/score" in line)
    assert step["train/reward"] == pytest.approx(episode["episode/score"] - 0.1 * episode["episode/kl"], rel=1e-4)
    (texts,) = tmp_path.glob("ppo/*/texts.jsonl")
    shown = [json.loads(line) for line in texts.read_text().splitlines()]
    assert [line["step"] for line in shown] == [0, 1]
    assert all("plus" in line["text"] and "--- best: score" in line["text"] for line in shown)


def test_demonstrations_are_learnt_beside_and_labels_decide_which_tokens() -> None:
    losses = []
    for masked in (True, False):
        ours = trainer(ptx_coef=0.5, apply_loss_mask=masked, accumulation_steps=2)
        stats = record_stats(ours)
        ours.fit(1, 2, 1, prompts(), demonstrations())  # two batches of two, as the step has two training batches
        actor = tiny_llama(initializer_range=0.2)
        total, tokens = 0.0, 0
        for row in encoded(f"the answer is {number}" for number in range(4)):
            ids = row["input_ids"]
            logits = actor(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
            places = range(2 if masked else 1, len(ids))
            total -= sum(logits[place - 1, ids[place]].item() for place in places)
            tokens += len(places)
        assert [step.ptx_loss for step in stats] == [pytest.approx(total / tokens, rel=1e-4)]
        losses.append(total / tokens)
    assert losses[0] != losses[1]


def test_the_default_ptx_coef_without_demonstrations_is_one_sentence_before_anything() -> None:
    with pytest.raises(ConfigError, match=r"ptx_coef is 0.9 .*but there is no pretrain_dataloader"):
        trainer(ptx_coef=0.9).fit(1, 1, 1, [])


def test_an_estimator_without_critic_learns_from_groups() -> None:
    options = OPTIONS.model_copy(update={"advantage_estimator": "rloo", "samples_per_prompt": 2})
    ours = trainer(options=options, critic=None, critic_optim=None, critic_lr_scheduler=None, train_batch_size=4)
    before = weights_of(ours)
    ours.fit(1, 1, 1, prompts())
    assert ours.position.step == 1
    assert any(not torch.equal(before[name], after) for name, after in weights_of(ours).items())


def weights_of(ours: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in ours.learner.actor.named_parameters()}


def test_the_boosters_arithmetic_is_taken_where_the_options_name_none() -> None:
    assert trainer(options=PPOOptions(lam=0.95)).learner.config.dtype == "float32"
    booster = PlainBooster("bf16")
    ours = trainer(options=PPOOptions(rollout_dtype="float32"), actor_booster=booster)
    assert (ours.learner.config.dtype, ours.experience_maker.config.rollout_dtype) == ("bfloat16", "float32")


def test_a_fit_that_has_nothing_left_to_do_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ours = trainer()
    ours.fit(1, 1, 1, prompts())
    with caplog.at_level(logging.WARNING):
        ours.fit(1, 1, 1, prompts())
    assert "1 episode done already" in caplog.text
    assert ours.position.step == 1
