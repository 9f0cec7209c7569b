"""One optimizer step of supervised training by TRL or, where there is no TRL_PATH, by transformers and torch alone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from torch import nn
from transformers import AutoModelForSequenceClassification, TrainerCallback

from bench.speed.measure import DEVICE, Run, now, seconds_of
from bench.speed.models import ARITHMETIC, DTYPE, directory, load
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.models.loading import load_tokenizer
from rlhf_core.models.saving import quiet
from rlhf_core.models.trunk import autocast
from rlhf_core.supervised.batches import MaskedTokens
from rlhf_core.training.padding import pad_right

Step = Callable[[], float]
"""Takes one step and returns its seconds."""
LR = 1e-5
_UNLABELLED = -100
"""What transformers does not learn."""


def trl_path() -> str | None:
    """Return the directory that holds TRL; None without one."""
    return os.environ.get("TRL_PATH") or None


def trl_version() -> str:
    """Return which TRL the peer is."""
    if trl_path() is None:
        return "absent"
    _find_trl()
    return version("trl")


def sft_step(run: Run, rows: Sequence[MaskedTokens]) -> Step:
    """Return a step of supervised fine-tuning on all of these rows."""
    labels = [
        [token if learnt else _UNLABELLED for token, learnt in zip(row.ids, row.loss_mask, strict=True)] for row in rows
    ]
    if trl_path() is not None:
        _find_trl()
        from trl import SFTConfig, SFTTrainer  # noqa: PLC0415 - it is not in the lock

        data = Dataset.from_dict({"input_ids": [[*row.ids] for row in rows], "labels": labels})
        return _trl_step(run, SFTTrainer, SFTConfig, load(run, "float32"), data)
    model = load(run, "float32").train()
    ids, mask = pad_right([row.ids for row in rows], DEVICE)
    wanted = pad_right(labels, DEVICE)[0].masked_fill(~mask, _UNLABELLED)
    return _plain_step(model, lambda: model(input_ids=ids, attention_mask=mask.long(), labels=wanted).loss)


def reward_step(run: Run, pairs: Sequence[EncodedPair]) -> Step:
    """Return a step of a reward model on all of these pairs."""
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(directory(run), num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    chosen, rejected = [[*pair.chosen] for pair in pairs], [[*pair.rejected] for pair in pairs]
    if trl_path() is not None:
        _find_trl()
        from trl import RewardConfig, RewardTrainer  # noqa: PLC0415

        data = Dataset.from_dict({"chosen_ids": chosen, "rejected_ids": rejected})
        return _trl_step(run, RewardTrainer, RewardConfig, model, data)
    model.to(DEVICE).train()
    ids, mask = pad_right([*chosen, *rejected], DEVICE)

    def loss() -> torch.Tensor:
        better, worse = model(input_ids=ids, attention_mask=mask.long()).logits.float().chunk(2)
        return -nn.functional.logsigmoid(better - worse).mean()

    return _plain_step(model, loss)


def _plain_step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        with autocast(DEVICE, DTYPE):
            found = loss()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: seconds_of(step)


class _Stopwatch(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Times a step from its first forward pass to its end; what comes before and after a run is left out."""

    seconds = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin."""
        self._started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End."""
        self.seconds = now() - self._started


def _trl_step(run: Run, kind: Any, config: Any, model: Any, data: Dataset) -> Step:
    """Return a run of one step of a trainer of TRL's; weights and optimizer stay from one to the next."""
    place, watch = TemporaryDirectory(), _Stopwatch()
    arguments = config(
        output_dir=place.name, use_cpu=DEVICE.type == "cpu", bf16=ARITHMETIC == "bfloat16", max_steps=1,
        gradient_checkpointing=False, per_device_train_batch_size=len(data), learning_rate=LR,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", disable_tqdm=True, max_length=None,
        dataloader_pin_memory=False,
    )  # fmt: skip
    disable_progress_bars()
    with quiet():
        trainer = kind(
            model=model, args=arguments, train_dataset=data, processing_class=load_tokenizer(directory(run)),
            callbacks=[watch],
        )  # fmt: skip

    def step() -> float:
        assert place.name  # it lasts as long as the trainer
        trainer.train()
        return watch.seconds

    return step


def _find_trl() -> None:
    if trl_path() not in sys.path:
        sys.path.append(str(trl_path()))
        logging.getLogger("trl").setLevel(logging.ERROR)
