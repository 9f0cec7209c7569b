"""The sources of a score: each says its own numbers, and what they are when scaled to order one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.counting import counted
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import device_of
from rlhf_core.rewards.model import RLVRRewardModel, called_values
from rlhf_core.rewards.process import RewardProcess, call_each
from rlhf_core.rewards.resolve import RewardFunction
from rlhf_core.rewards.verifying import Answered, Judge, Verdict
from rlhf_core.training.micro_batches import Piece, cost_on, pieces
from rlhf_core.types import Prompt

VERIFIER = "verifier"
REWARD_MODEL = "reward_model"


class ScoringBatch(NamedTuple):
    """Responses as text and as token ids, on the CPU; rows are the same throughout."""

    prompts: Sequence[Prompt]
    responses: Sequence[str]
    """Decoded, without the stop token."""
    ended: Tensor
    """[B], True where a stop token ended the response."""
    sequences: Tensor
    """[B S], prompt and response."""
    attention_mask: Tensor
    """[B S], True on tokens."""
    action_mask: Tensor
    """[B A], True on response tokens."""

    def pieces(self, model: nn.Module, most: int | None = None) -> list[Piece]:
        """Return the rows as a model reads them together, at most so many at a time."""
        return pieces(
            self.sequences, self.attention_mask, self.action_mask,
            most=most or len(self.sequences), cost=cost_on(device_of(model), model),
        )  # fmt: skip


class Judged(NamedTuple):
    """One source's opinion."""

    scaled: Tensor
    """[B], of order one."""
    raw: Mapping[str, Tensor]
    """[B] each, as they came; NaN where a call failed."""
    well_formed: Tensor | None = None
    """[B], True where a response has the form of an answer; None from a source that does not look at it."""
    failures: Sequence[Mapping[str, str]] = ()
    """Of each row, by name, why what was asked gave no number; empty from a source that cannot fail."""


Source = Callable[[ScoringBatch], Judged]


class Verifier:
    """The data's verifier: 0 to 1, where 1 is right.

    Args:
        judge: says so; closed with this source.
        required: refuse prompts that it cannot judge; else responses to them count as wrong.
    """

    def __init__(self, judge: Judge, *, required: bool) -> None:
        self._judge, self._required = judge, required
        self.close = judge.close

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return the verdicts.

        Raises:
            DataError: if a prompt has nothing to judge by, and judging is required.
        """
        rows = [
            Answered(prompt.text, response, prompt.answer, prompt.entry, prompt.key, ended)
            for prompt, response, ended in zip(batch.prompts, batch.responses, batch.ended.tolist(), strict=True)
        ]
        verdicts = self._judge.judge(rows) if self._required else self._as_far_as_can_be(rows)
        found = torch.tensor([verdict.score for verdict in verdicts])
        formed = torch.tensor([verdict.well_formed for verdict in verdicts])
        return Judged(found, {VERIFIER: found}, formed, _by_row(VERIFIER, [verdict.failure for verdict in verdicts]))

    def _as_far_as_can_be(self, rows: Sequence[Answered]) -> list[Verdict]:
        try:
            return self._judge.judge(rows)
        except DataError:
            if len(rows) == 1:
                return [Verdict(0.0, False)]
            return [verdict for row in rows for verdict in self._as_far_as_can_be([row])]


class TrainedScores:
    """A trained reward model: its scores in standard deviations of its held-out samples'.

    Args:
        model: in evaluation mode from here on.
    """

    def __init__(self, model: RewardModel) -> None:
        self._model = model.eval()

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return raw and standardised scores, computed where the model is.

        Raises:
            ModelError: if a token is none of the model's.
        """
        known, highest = self._model.trunk.get_input_embeddings().num_embeddings, int(batch.sequences.max())
        if highest >= known:
            raise ModelError(
                f"a response has token {highest}, but the reward model knows {known} tokens; take a reward model "
                "that was trained with the policy's tokenizer"
            )
        device = device_of(self._model)
        raw = torch.zeros(len(batch.sequences))
        with torch.no_grad():
            for piece in batch.pieces(self._model):
                said = self._model(piece.sequences.to(device), piece.attention_mask.to(device))
                raw[piece.rows] = said.float().cpu()
            scaled = self._model.standardise(raw.to(device))
        return Judged(scaled.cpu(), {REWARD_MODEL: raw})


class FunctionScores:
    """A reward function: its values as shares of its maximum.

    Args:
        function: of text, or of text and the task's record.
        process: where it runs; closed with this source.
    """

    def __init__(self, function: RewardFunction, process: RewardProcess) -> None:
        self._function, self._process = function, process

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return raw values and shares.

        Raises:
            DataError: if the function needs the task's records and a prompt has none.
        """
        rows: list[tuple[str | None, ...]] = []
        for prompt, response in zip(batch.prompts, batch.responses, strict=True):
            row = (prompt.text, response, prompt.answer)
            rows.append((*row, self._entry(prompt)) if self._function.form == "entry" else row)
        names = [f"the response to {prompt.text[:40]!r} (key {prompt.key})" for prompt in batch.prompts]
        name, called = self._function.name, call_each(self._process, self._function, rows, names=names)
        raw = called_values(called)
        failures = _by_row(name, [each.failure for each in called])
        return Judged(raw / self._function.maximum, {name: raw}, failures=failures)

    def close(self) -> None:
        """End the function's process."""
        self._process.close()

    def _entry(self, prompt: Prompt) -> str:
        if prompt.entry is None:
            raise DataError(
                f"reward function {self._function.name} needs the record that its task keeps of each problem, and "
                f"the prompt that begins {prompt.text[:40]!r} has none; draw the data from that task (data.task)"
            )
        return prompt.entry


class VerifiableScores:
    """An `RLVRRewardModel`: the sum of its functions' shares of their maxima.

    Args:
        model: closed with this source.
    """

    def __init__(self, model: RLVRRewardModel) -> None:
        self._model = model
        self.close = model.close

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return each function's raw values, and the sum of their shares."""
        start = batch.sequences.shape[1] - batch.action_mask.shape[1]
        called = self._model.call(
            batch.sequences,
            batch.attention_mask,
            response_start=[start] * len(batch.prompts),
            response_end=(start + batch.action_mask.sum(dim=1) - 1).tolist(),
            gt_answer=[prompt.answer for prompt in batch.prompts],
        )
        raw = {name: called_values(each) for name, each in called.items()}
        shares = [values / self._model.maxima[name] for name, values in raw.items()]
        failures = [
            {name: failed for name, each in called.items() if (failed := each[row].failure) is not None}
            for row in range(len(batch.prompts))
        ]
        return Judged(torch.stack(shares).sum(dim=0), raw, failures=failures)


class CalledScores:
    """Anything that is called like a reward model; its scores are taken as they are.

    Args:
        model: called with token ids and attention mask, on the device of its weights if it has some.
    """

    def __init__(self, model: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._model = model

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return the model's scores.

        Raises:
            ModelError: if it does not return one score for each response.
        """
        weight = next(iter(self._model.parameters()), None) if isinstance(self._model, torch.nn.Module) else None
        device = torch.device("cpu") if weight is None else weight.device
        with torch.no_grad():
            found = self._model(batch.sequences.to(device), batch.attention_mask.to(device)).float().cpu()
        if found.shape != (len(batch.prompts),):
            raise ModelError(
                f"the reward model returned scores of shape {tuple(found.shape)} for "
                f"{counted(len(batch.prompts), 'response')}; "
                "it should return one score for each"
            )
        return Judged(found, {REWARD_MODEL: found})


def _by_row(name: str, failures: Sequence[str | None]) -> list[dict[str, str]]:
    return [{} if failed is None else {name: failed} for failed in failures]


AnyRewardModel = RewardModel | RLVRRewardModel | Callable[..., Tensor]
"""What may stand where coati has a reward model."""


def model_source(model: AnyRewardModel) -> Source:
    """Return the source that a reward model of any kind is."""
    if isinstance(model, RewardModel):
        return TrainedScores(model)
    return VerifiableScores(model) if isinstance(model, RLVRRewardModel) else CalledScores(model)
