"""From the batches of data loaders to prompts and demonstrations."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.errors import DataError
from rlhf_core.experience_maker.naive import prompts_from_batch
from rlhf_core.strategy.agreement import together
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.base import PaddedBatch
from rlhf_core.trainer.loaders import Batches, CycledLoader
from rlhf_core.types import Prompt

_IGNORED = -100


class NumberedPrompts(NamedTuple):
    """One row for each response that is to be sampled."""

    prompts: list[Prompt]
    samples: list[int]
    """Which of its prompt's samples in this episode each row is."""


class Feed:
    """What a fit learns from: prompts, and demonstrations where there are some; every method is called by all ranks.

    Args:
        prompts: batches as `prompts_of` takes them.
        demonstrations: batches as `demonstrations_of` takes them; None if none are learnt.
        tokenizer: gives prompts' texts.
        ranks: who learns together.
        device: of demonstrations.
        only_labels: as for `demonstrations_of`.
    """

    def __init__(
        self,
        prompts: Batches,
        demonstrations: Batches | None,
        *,
        tokenizer: Any,
        ranks: Ranks,
        device: torch.device,
        only_labels: bool,
    ) -> None:
        self.loaders = {"prompts": CycledLoader(prompts, what="prompt_dataloader")}
        if demonstrations is not None:
            self.loaders["demonstrations"] = CycledLoader(demonstrations, what="pretrain_dataloader")
        self._tokenizer, self._ranks, self._device, self._only_labels = tokenizer, ranks, device, only_labels

    def prompts(self) -> list[Prompt]:
        """Return the next batch of prompts."""
        loader = self.loaders["prompts"]
        return together(self._ranks, lambda: prompts_of(loader.next(), self._tokenizer), what="read its prompts")

    def demonstrations(self, batches: int) -> PaddedBatch | None:
        """Return the next batches of demonstrations as one; None if none are learnt."""
        loader = self.loaders.get("demonstrations")
        if loader is None:
            return None

        def read() -> PaddedBatch:
            rows = [loader.next() for _ in range(batches)]
            return demonstrations_of(rows, device=self._device, only_labels=self._only_labels)

        return together(self._ranks, read, what="read its demonstrations")


class PromptNumbers:
    """Numbers the samples of a prompt through an episode, over all ranks: no two draw the same noise.

    The number says which of the prompt's occurrences a row is, in the order of ranks: two ranks draw what one rank
    with both their batches would.

    Args:
        samples_per_prompt: responses of each row of a batch.
        ranks: who collects together.
    """

    def __init__(self, samples_per_prompt: int, ranks: Ranks) -> None:
        self._per_prompt = samples_per_prompt
        self._ranks = ranks
        self._seen: Counter[int] = Counter()

    def begin_episode(self) -> None:
        """Forget all occurrences: another episode draws other noise anyway."""
        self._seen.clear()

    def number(self, prompts: Sequence[Prompt]) -> NumberedPrompts:
        """Return each prompt as often as it is to be sampled, numbered; called by all ranks together.

        Raises:
            DataError: on all ranks, if they have unequal numbers of prompts.
        """
        rows = torch.tensor(float(len(prompts)))
        most, least = self._ranks.max(rows).item(), -self._ranks.max(-rows).item()
        if most != least:
            raise DataError(
                f"the ranks have between {least:.0f} and {most:.0f} prompts in one batch, but must have equal numbers; "
                "use a distributed sampler, and leave out the last batch if it is smaller (drop_last=True)"
            )
        codes = self._ranks.gather(torch.tensor([_code(prompt.key) for prompt in prompts], dtype=torch.int64))
        numbers = [self._occurrence(code) for code in codes.tolist()]
        first = self._ranks.rank * len(prompts)
        own = numbers[first : first + len(prompts)]
        pairs = [
            (prompt, number * self._per_prompt + place)
            for prompt, number in zip(prompts, own, strict=True)
            for place in range(self._per_prompt)
        ]
        return NumberedPrompts([prompt for prompt, _ in pairs], [number for _, number in pairs])

    def _occurrence(self, code: int) -> int:
        self._seen[code] += 1
        return self._seen[code] - 1


def prompts_of(batch: Mapping[str, Any], tokenizer: Any) -> list[Prompt]:
    """Return the prompts of a batch, without their padding.

    Args:
        batch: "input_ids" and "attention_mask", [B P]; optional lists "gt_answer" (None where there is none) and
            "key". Without a key, the prompt's text names it.
        tokenizer: gives the prompt's text.

    Raises:
        DataError: if there is no row, or a row is nothing but padding.
    """
    ids, mask = torch.as_tensor(batch["input_ids"]), torch.as_tensor(batch["attention_mask"])
    answers = batch.get("gt_answer") or [None] * len(ids)
    prompts = prompts_from_batch(ids, mask, answers, tokenizer)
    keys = batch.get("key") or [None] * len(ids)
    return [prompt if key is None else prompt._replace(key=key) for prompt, key in zip(prompts, keys, strict=True)]


def demonstrations_of(batches: Sequence[Mapping[str, Any]], *, device: torch.device, only_labels: bool) -> PaddedBatch:
    """Return batches of demonstrations as one, padded on the right; what counts is a mask over all but the first token.

    Args:
        batches: "input_ids" and "attention_mask", [B S], and optional "labels", -100 where nothing is learnt.
        device: of the result.
        only_labels: learn the tokens that have labels, not all that are attended to.

    Raises:
        DataError: if no token is to be learnt.
    """
    rows: list[Tensor] = []
    counted: list[Tensor] = []
    for batch in batches:
        attended = torch.as_tensor(batch["attention_mask"]).bool()
        counts = attended.clone()
        if only_labels and "labels" in batch:
            counts &= torch.as_tensor(batch["labels"]) != _IGNORED
        for ids, held, learnt in zip(torch.as_tensor(batch["input_ids"]), attended, counts, strict=True):
            rows.append(ids[held])
            counted.append(learnt[held])
    width = max(len(row) for row in rows)
    sequences = torch.stack([_padded(row, width) for row in rows])
    mask = torch.stack([_padded(torch.ones_like(row, dtype=torch.bool), width) for row in rows])
    action_mask = torch.stack([_padded(learnt, width) for learnt in counted])[:, 1:]  # nothing predicts the first
    if not action_mask.any():
        raise DataError("a batch of pretrain_dataloader has no token to learn; check its labels and attention_mask")
    return PaddedBatch(sequences.to(device), mask.to(device), action_mask.to(device))


def _padded(row: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, width - len(row)))


def _code(key: str) -> int:
    """Return a number that stands for the key and travels in a tensor."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:7])
