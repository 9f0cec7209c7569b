"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.buffer.order import minibatch_order
from rlhf_core.config import SFTConfig
from rlhf_core.errors import DataError
from rlhf_core.functional.logprobs import logprobs_from_logits
from rlhf_core.functional.losses import lm_loss
from rlhf_core.models.actor import response_logits
from rlhf_core.models.device import autocast, device_of
from rlhf_core.models.lora import attach_lora
from rlhf_core.trainer.base import (
    Metrics,
    OnStep,
    TokenIds,
    pad_examples,
    training_mode,
)
from rlhf_core.trainer.optim import Trained, make_trained, take_step, warmup_then_decay

Demonstration = tuple[TokenIds, TokenIds]


def train_sft(
    model: PreTrainedModel,
    examples: Sequence[Demonstration],
    config: SFTConfig,
    *,
    seed: int,
    autocast_dtype: torch.dtype,
    on_step: OnStep | None = None,
) -> list[Metrics]:
    """Train a causal language model, in place, to answer as the demonstrations do.

    The loss is on response tokens only, and a token mean over each batch. With `config.lora`, adapters are attached
    to the model first and they alone are trained; `models.lora.save_merged` writes the result.

    Args:
        model: on its device, in float32 (with adapters: in any dtype).
        examples: token ids of prompt and response, the stop token included.
        config: epochs, batch sizes, learning rate.
        seed: of the order, of the adapters and of dropout.
        autocast_dtype: arithmetic of the forward pass.
        on_step: told the metrics of each step as it ends.

    Returns:
        Of each step: step, loss, lr, grad_norm, tokens.

    Raises:
        DataError: before any training, if there is no example, or one is too long or has an empty part.
        TrainingError: if a loss or gradient is not finite.
    """
    _check(examples, config.max_length)
    if config.lora is not None:
        attach_lora(model, config.lora, seed=seed)
    steps_per_epoch = -(-len(examples) // config.batch_size)
    trained = make_trained(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        schedule=warmup_then_decay(config.warmup_steps, config.epochs * steps_per_epoch),
    )
    history: list[Metrics] = []
    with training_mode(model, seed=seed):
        for epoch in range(1, config.epochs + 1):  # from 1: the first pass is permuted too
            for rows in minibatch_order(
                seed=seed, episode=0, epoch=epoch, samples=len(examples), batch_size=config.batch_size
            ):
                batch = [examples[row] for row in rows]
                metrics = {"step": float(len(history) + 1)} | _step(trained, batch, config, autocast_dtype)
                history.append(metrics)
                if on_step is not None:
                    on_step(metrics)
    return history


def _step(trained: Trained, batch: Sequence[Demonstration], config: SFTConfig, autocast_dtype: torch.dtype) -> Metrics:
    tokens = sum(len(response) for _, response in batch)
    lr = trained.scheduler.get_last_lr()[0]
    device = device_of(trained.model)
    total = torch.zeros((), device=device)
    for start in range(0, len(batch), config.micro_batch_size):
        micro = batch[start : start + config.micro_batch_size]
        loss = _loss(trained, micro, tokens, device, autocast_dtype)
        torch.autograd.backward(loss)
        total += loss.detach()
    norm = take_step(trained, grad_clip=config.grad_clip, loss=total, what="language model")
    return {"loss": total.item(), "lr": float(lr), "grad_norm": norm, "tokens": float(tokens)}


def _loss(
    trained: Trained,
    micro: Sequence[Demonstration],
    tokens: int,
    device: torch.device,
    autocast_dtype: torch.dtype,
) -> Tensor:
    ids, mask, action_mask = pad_examples(micro, device)
    width = action_mask.shape[1]
    with autocast(device, autocast_dtype):
        logits = response_logits(trained.model, sequences=ids, attention_mask=mask, num_actions=width)
    logprobs = logprobs_from_logits(logits, ids[:, -width:], temperature=1.0)
    return lm_loss(logprobs=logprobs, mask=action_mask, denominator=tokens)


def _check(examples: Sequence[Demonstration], max_length: int) -> None:
    if not examples:
        raise DataError("expected at least one demonstration to train on, got none")
    for row, (prompt, response) in enumerate(examples, start=1):
        length = len(prompt) + len(response)
        if length > max_length:
            raise DataError(
                f"demonstration {row} of {len(examples)} has {length} tokens, but sft.max_length is {max_length}; "
                "raise sft.max_length or shorten the demonstration"
            )
        if not prompt or not response:
            raise DataError(f"demonstration {row} of {len(examples)} has an empty prompt or response")
