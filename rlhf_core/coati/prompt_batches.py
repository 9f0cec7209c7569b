"""From the batches of data loaders to prompts and demonstrations."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.coati.experience_maker import prompts_from_batch
from rlhf_core.errors import DataError
from rlhf_core.functional.losses import IGNORED
from rlhf_core.models.compatibility import check_vocabulary
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.loaders import Batches, CycledLoader, LoaderPlace
from rlhf_core.training.modes import random_states, set_random_states
from rlhf_core.training.padding import PaddedBatch
from rlhf_core.types import Prompt


class NumberedPrompts(NamedTuple):
    """One row for each response that is to be sampled."""

    prompts: list[Prompt]
    samples: list[int]
    """Which of its prompt's samples in this episode each row is."""


class Places(NamedTuple):
    """Where the loaders of a feed stand."""

    loaders: dict[str, LoaderPlace]
    random: dict[str, Tensor]
    """The global random states, from which a loader's next pass may be shuffled."""


class Feed:
    """What a fit learns from: prompts, and demonstrations where there are some; every method is called by all ranks.

    Args:
        prompts: batches as `prompts_of` takes them.
        demonstrations: batches as `demonstrations_of` takes them; None if none are learnt.
        tokenizer: gives prompts' texts.
        ranks: who learns together.
        device: of demonstrations.
        only_labels: as for `demonstrations_of`.
        vocabulary: rows of the actor's embedding; None if it does not say.
        before: the loaders of an earlier feed; one that reads from the same object goes on where it stands.
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
        vocabulary: int | None = None,
        before: Mapping[str, CycledLoader] | None = None,
    ) -> None:
        self.loaders: dict[str, CycledLoader] = {}
        self._kept: set[str] = set()
        for name, what, batches in (
            ("prompts", "prompt_dataloader", prompts),
            ("demonstrations", "pretrain_dataloader", demonstrations),
        ):
            if batches is not None:
                known = (before or {}).get(name)
                if known is not None and known.gives_from(batches):
                    self._kept.add(name)
                    self.loaders[name] = known
                else:
                    self.loaders[name] = CycledLoader(batches, what=what)
        self._tokenizer, self._ranks, self._device, self._only_labels = tokenizer, ranks, device, only_labels
        self._vocabulary = vocabulary

    def places(self) -> Places:
        """Return where the loaders stand."""
        return Places({name: loader.place() for name, loader in self.loaders.items()}, random_states())

    def go_back(self, places: Places) -> None:
        """Let the loaders of the earlier feed give again what they have given since they stood at these places."""
        begun_again = [self.loaders[name].go_back(places.loaders[name]) for name in sorted(self._kept)]
        if any(begun_again):
            set_random_states(places.random)

    def prompts(self) -> list[Prompt]:
        """Return the next batch of prompts."""
        loader = self.loaders["prompts"]

        def read() -> list[Prompt]:
            return prompts_of(loader.next(), self._tokenizer, vocabulary=self._vocabulary)

        return together(self._ranks, read, what="read its prompts")

    def demonstrations(self, batches: int) -> PaddedBatch | None:
        """Return the next batches of demonstrations as one; None if none are learnt."""
        loader = self.loaders.get("demonstrations")
        if loader is None:
            return None

        def read() -> PaddedBatch:
            rows = [loader.next() for _ in range(batches)]
            return demonstrations_of(
                rows, device=self._device, only_labels=self._only_labels, vocabulary=self._vocabulary
            )

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


def prompts_of(batch: Mapping[str, Any], tokenizer: Any, *, vocabulary: int | None = None) -> list[Prompt]:
    """Return the prompts of a batch, without their padding.

    Args:
        batch: "input_ids" and "attention_mask", [B P]; optional lists "gt_answer" and "entry" (None where there is
            none) and "key". Without a key, the prompt's text names it.
        tokenizer: gives the prompt's text.
        vocabulary: number of tokens that the actor knows; None looks at none.

    Raises:
        DataError: if something is missing, there is no row, a row is nothing but padding, or a token is unknown.
    """
    ids, mask = (_field(batch, name, of="prompts") for name in ("input_ids", "attention_mask"))
    if ids.shape == mask.shape:  # otherwise the next line says what is wrong
        check_vocabulary(ids[mask.bool()], vocabulary, what="a batch's prompts")
    answers = batch.get("gt_answer") or [None] * len(ids)
    prompts = prompts_from_batch(ids, mask, answers, tokenizer)
    keys = batch.get("key") or [None] * len(ids)
    if len(keys) != len(ids):
        raise DataError(f"a batch of {len(ids)} prompts has {len(keys)} keys; give one for each row")
    entries = batch.get("entry") or [None] * len(ids)
    if len(entries) != len(ids):
        raise DataError(
            f"a batch of {len(ids)} prompts has {len(entries)} of entry; give one for each row, and None where there "
            "is none"
        )
    return [
        prompt._replace(key=prompt.key if key is None else key, entry=entry)
        for prompt, key, entry in zip(prompts, keys, entries, strict=True)
    ]


def demonstrations_of(
    batches: Sequence[Mapping[str, Any]],
    *,
    device: torch.device,
    only_labels: bool,
    vocabulary: int | None = None,
) -> PaddedBatch:
    """Return batches of demonstrations as one, padded on the right; what counts is a mask over all but the first token.

    Args:
        batches: "input_ids" and "attention_mask", [B S], and optional "labels", -100 where nothing is learnt.
        device: of the result.
        only_labels: learn the tokens that have labels, not all that are attended to.
        vocabulary: number of tokens that the actor knows; None looks at none.

    Raises:
        DataError: if something is missing or of another shape, a token is unknown, or none is to be learnt.
    """
    rows: list[Tensor] = []
    counted: list[Tensor] = []
    for batch in batches:
        sequences = _field(batch, "input_ids", of="demonstrations")
        attended = _field(batch, "attention_mask", of="demonstrations", like=sequences).bool()
        check_vocabulary(sequences[attended], vocabulary, what="a batch's demonstrations")
        counts = attended.clone()
        if only_labels and "labels" in batch:
            counts &= _field(batch, "labels", of="demonstrations", like=sequences) != IGNORED
        for ids, held, learnt in zip(sequences, attended, counts, strict=True):
            rows.append(ids[held])
            counted.append(learnt[held])
    width = max(len(row) for row in rows)
    sequences = torch.stack([_padded(row, width) for row in rows])
    mask = torch.stack([_padded(torch.ones_like(row, dtype=torch.bool), width) for row in rows])
    action_mask = torch.stack([_padded(learnt, width) for learnt in counted])[:, 1:]  # nothing predicts the first
    if not action_mask.any():
        raise DataError("a batch of pretrain_dataloader has no token to learn; check its labels and attention_mask")
    return PaddedBatch(sequences.to(device), mask.to(device), action_mask.to(device))


def _field(batch: Mapping[str, Any], name: str, *, of: str, like: Tensor | None = None) -> Tensor:
    """Return a batch's tensor in host memory, of the shape of another."""
    if name not in batch:
        raise DataError(f"a batch of {of} has no {name!r}; it has {', '.join(map(repr, batch)) or 'nothing'}")
    found = torch.as_tensor(batch[name]).detach().cpu()
    if like is not None and found.shape != like.shape:
        raise DataError(
            f"a batch of {of} has {name} of shape {list(found.shape)}, but input_ids of {list(like.shape)}; they must "
            "be equal"
        )
    return found


def _padded(row: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, width - len(row)))


def _code(key: str) -> int:
    """Return a number that stands for the key and travels in a tensor."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:7])
