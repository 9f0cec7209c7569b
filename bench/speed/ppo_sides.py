"""One side of the PPO step: `python -m bench.speed.ppo_sides ours|trl SIZES`, SIZES as JSON; prints one line.

TRL 1.12 has to be on PYTHONPATH for its side. The first update is left out: optimizers reserve their memory there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import inject_adapter_in_model
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel, TrainerCallback

from bench.speed.measure import DEVICE, now
from bench.speed.models import peft_adapters, random_ids, with_adapters, with_peft
from rlhf_core import Callback, Critic, PlainBooster, PPOTrainer, RewardModel
from rlhf_core.config import PPOOptions
from rlhf_core.models.base import load_base, open_base, over_same_weights
from rlhf_core.models.loading import load_causal_lm, load_tokenizer
from rlhf_core.models.trunk import trunk_of

UPDATES = 2
PRECISIONS: dict[str, Any] = {"bfloat16": "bf16", "float32": "fp32"}
LR = 1e-5
MARK = "RESULT "
"""Before the line that is for whoever started the side: TRL prints others."""


class Given(NamedTuple):
    """What both sides are told."""

    directory: str
    dtype: str
    adapters: bool
    rows: int
    prompt: int
    response: int


class Clock:
    """Notes when updates end, and what the process holds: before there are models, and at most in its updates."""

    def __init__(self) -> None:
        self._modules = _held("VmRSS")
        self._times: list[float] = []

    def begin(self) -> None:
        """Note that the first update begins."""
        self._times = [now()]
        if DEVICE.type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # the system forgets the peak of loading

    def tick(self) -> None:
        """Note that an update has ended."""
        self._times.append(now())

    def told(self) -> dict[str, float]:
        """Return seconds of the fastest update but the first, and megabytes."""
        taken = [end - start for start, end in zip(self._times, self._times[1:], strict=False)]
        return {"seconds": min(taken[1:]), "megabytes": _held("VmHWM"), "modules": self._modules}


def _held(what: str) -> float:
    """Return megabytes of this process, VmRSS now or VmHWM at its peak; on a GPU, those of PyTorch's peak there."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[what].split()[0]) * 1024 / 1e6


# --- ours


class Prompts:
    """Batches of prompts, as a loader gives them."""

    def __init__(self, ids: Tensor, rows: int) -> None:
        self._batches = ids.split(rows)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield them in order."""
        for ids in self._batches:
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class _Told(Callback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_fit_start(self) -> None:
        self._clock.begin()

    def on_episode_end(self, episode: int) -> None:  # noqa: ARG002 - coati's
        self._clock.tick()


def ours(given: Given, scratch: Path) -> dict[str, float]:
    """Let our trainer take its updates."""
    clock = Clock()
    actor, critic, initial, reward_model = our_models(given, scratch)
    trained: dict[str, Any] = {}
    for role, model in (("actor", actor), ("critic", critic)):
        optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=LR, fused=True)
        # TRL's loop does not clip
        booster = PlainBooster(precision=PRECISIONS[given.dtype], max_norm=float("inf"))
        boosted = booster.boost(model=model, optimizer=optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 1.0))
        names = (role, f"{role}_optim", f"{role}_lr_scheduler")
        trained |= {f"{role}_booster": booster, **dict(zip(names, (boosted[0], boosted[1], boosted[4]), strict=True))}
    trainer = PPOTrainer(
        **trained, reward_model=reward_model, initial_model=initial, tokenizer=load_tokenizer(Path(given.directory)),
        kl_coef=0.05, ptx_coef=0.0, train_batch_size=given.rows, callbacks=[_Told(clock)],
        options=PPOOptions(dtype=given.dtype, rollout_dtype=given.dtype), max_new_tokens=given.response,
    )  # fmt: skip
    maker = trainer.experience_maker
    maker.generation = replace(maker.generation, stop_ids=())  # all rows to the full length, as TRL's
    ids = torch.tensor(random_ids(actor, UPDATES * given.rows, given.prompt))
    trainer.fit(
        num_episodes=UPDATES, num_collect_steps=1, num_update_steps=1, prompt_dataloader=Prompts(ids, given.rows)
    )
    return clock.told()


def our_models(given: Given, scratch: Path) -> tuple[PreTrainedModel, Critic, PreTrainedModel | None, RewardModel]:
    """Return actor, critic, initial and reward model; with adapters, all over one base, as in a run."""
    source = Path(given.directory)
    if given.adapters:
        arithmetic = getattr(torch, given.dtype)
        base = open_base(source, "0" * 64, arithmetic=arithmetic, models_dir=scratch)
        actor = load_base(base, arithmetic=arithmetic, device=DEVICE)
        critic = Critic(over_same_weights(trunk_of(actor)))
        reward_model = RewardModel(over_same_weights(trunk_of(actor)))
        for model in (actor, critic.trunk, reward_model.trunk):
            with_adapters(model)
        return actor, critic, None, reward_model.requires_grad_(requires_grad=False)
    actor = load_causal_lm(source, "float32", device=DEVICE)
    frozen = (load_causal_lm(source, given.dtype, device=DEVICE) for _ in range(2))
    return actor, Critic.from_causal_lm(actor), next(frozen), RewardModel(trunk_of(next(frozen)))


# --- TRL's


class _Updates(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.tick()


def trl(given: Given, scratch: Path) -> dict[str, float]:
    """Let TRL's trainer take its updates."""
    from trl.experimental import ppo  # noqa: PLC0415 - it is not in the lock

    clock, tokenizer = Clock(), load_tokenizer(Path(given.directory))
    tokenizer.padding_side = "left"
    policy, reference, value, reward_model = trl_models(given)
    data = Dataset.from_dict({"input_ids": random_ids(reward_model, UPDATES * given.rows, given.prompt)})
    config = ppo.PPOConfig(
        output_dir=str(scratch), use_cpu=DEVICE.type == "cpu", bf16=given.dtype == "bfloat16", report_to="none",
        logging_steps=10_000, save_strategy="no", num_sample_generations=0, disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=given.rows, gradient_accumulation_steps=1,
        num_mini_batches=1, total_episodes=len(data), local_rollout_forward_batch_size=given.rows,
        response_length=given.response, stop_token=None, temperature=1.0, missing_eos_penalty=None, num_ppo_epochs=1,
        whiten_rewards=False, learning_rate=LR, dataloader_pin_memory=False,
    )  # fmt: skip
    ppo.PPOTrainer(
        args=config, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward_model,
        train_dataset=data, eval_dataset=data.select(range(given.rows)), value_model=value,
        callbacks=[_Updates(clock)],
    ).train()  # fmt: skip
    return clock.told()


def trl_models(given: Given) -> tuple[Any, Any, Any, Any]:
    """Return policy, reference, value and reward model: what is frozen is in the arithmetic's dtype."""
    kinds: dict[Any, dict[str, Any]] = {AutoModelForCausalLM: {}, AutoModelForSequenceClassification: {"num_labels": 1}}

    def load(kind: Any, *, trained: bool) -> Any:
        dtype = torch.float32 if trained and not given.adapters else getattr(torch, given.dtype)
        return kind.from_pretrained(given.directory, dtype=dtype, **kinds[kind])

    policy, value = (load(kind, trained=True) for kind in kinds)
    reward_model = load(AutoModelForSequenceClassification, trained=False)
    if not given.adapters:
        return policy, load(AutoModelForCausalLM, trained=False), value, reward_model
    value = inject_adapter_in_model(peft_adapters(), value)  # not wrapped: the trainer looks inside
    for parameter in value.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    value.score.requires_grad_(requires_grad=True)
    return with_peft(policy), None, value, reward_model


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        side = {"ours": ours, "trl": trl}[sys.argv[1]]
        sys.stdout.write(MARK + json.dumps(side(Given(**json.loads(sys.argv[2])), Path(directory))) + "\n")
