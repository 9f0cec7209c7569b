"""Verifiable rewards where a reward model is expected: the sum of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.functions import gsm8k_reward_fn, math_competition_reward_fn, response_text
from rlhf_core.rewards.process import Called, RewardProcess, call_each
from rlhf_core.rewards.resolve import RewardFunction, resolve_reward_function
from rlhf_core.rewards.structure import check_tags

_OURS = {
    gsm8k_reward_fn: "gsm8k_reward_fn",
    math_competition_reward_fn: "math_competition_reward_fn",
}


def called_values(called: Sequence[Called]) -> Tensor:
    """Return the values of calls, [B] in float32; NaN where they failed."""
    return torch.tensor([each.value for each in called], dtype=torch.float32)


class RLVRRewardModel:
    """Scores responses by functions of coati's form, each in a process of its own that may fail.

    A function is called as f(input_ids, attention_mask, response_start=, response_end=, gt_answer=, **kwargs)
    with one response, on the CPU. A call that fails gives NaN and a warning; PPO does not learn from its response.

    Args:
        reward_fn_list: the functions; one given twice counts twice. Of several with one name, all but the first
            bear their place in the list: `f`, `f#3`.
        **kwargs: handed to each: `tokenizer`, `tags` and what else they take. `stop_ids`, where they are given,
            are the tokens that end a response.
    """

    timeout_s: float = 10.0
    """Longest time of one call."""

    def __init__(self, reward_fn_list: Sequence[Callable[..., Any]], **kwargs: Any) -> None:
        if not reward_fn_list:
            raise ConfigError("RLVRRewardModel needs at least one reward function, got none")
        if kwargs.get("tags") is not None:
            check_tags(kwargs["tags"])
        self.reward_fn_list = list(reward_fn_list)
        self.kwargs = kwargs
        self._functions: list[RewardFunction] = []
        for function in reward_fn_list:
            self._functions.append(self._adapt(function))
        self._process: RewardProcess | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return `forward`'s scores."""
        return self.forward(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        response_start: Sequence[int] | None = None,
        response_end: Sequence[int] | None = None,
        gt_answer: Sequence[str | None] | None = None,
    ) -> Tensor:
        """Return the sum of the functions' raw values, [B] in float32; NaN where one failed.

        Args:
            input_ids: [B S], prompts and responses.
            attention_mask: [B S], True on tokens; None counts all.
            response_start: place of each response's first token; None is 0.
            response_end: place of each response's last token; None is the row's end.
            gt_answer: reference answers; None where there is none.
        """
        called = self.call(
            input_ids, attention_mask, response_start=response_start, response_end=response_end, gt_answer=gt_answer
        )
        return torch.stack([called_values(each) for each in called.values()]).sum(dim=0).to(input_ids.device)

    def call(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        response_start: Sequence[int] | None,
        response_end: Sequence[int] | None,
        gt_answer: Sequence[str | None] | None,
    ) -> dict[str, list[Called]]:
        """Return what came of each function's calls, by name; arguments as for `forward`."""
        count, width = input_ids.shape
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        starts = [0] * count if response_start is None else [int(place) for place in response_start]
        ends = [width - 1] * count if response_end is None else [int(place) for place in response_end]
        answers = [None] * count if gt_answer is None else list(gt_answer)
        rows = list(zip(input_ids.tolist(), mask.long().tolist(), starts, ends, answers, strict=True))
        return {each.name: self._judge(each, rows) for each in self._functions}

    @property
    def maxima(self) -> Mapping[str, float]:
        """The most that each function gives, by name: what makes its values one in size with other rewards."""
        return {function.name: function.maximum for function in self._functions}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing, as a reward model without weights has nothing to move."""
        del args, kwargs
        return self

    def eval(self) -> Self:
        """Do nothing, as nothing here is trained."""
        return self

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.close()

    def _judge(self, function: RewardFunction, rows: Sequence[tuple[Any, ...]]) -> list[Called]:
        self._process = self._process or RewardProcess(self.timeout_s)
        if function.form == "text":
            arguments: list[tuple[Any, ...]] = [("", self._text(row), row[4]) for row in rows]
        else:
            arguments = list(rows)
        names = [f"row {index}" for index in range(len(rows))]
        return call_each(self._process, function, arguments, names=names)

    def _text(self, row: tuple[Any, ...]) -> str:
        ids, mask, start, end = row[:4]
        tags, stop_ids = self.kwargs.get("tags"), self.kwargs.get("stop_ids")
        return response_text(ids, mask, start, end, self.kwargs["tokenizer"], tags=tags, stop_ids=stop_ids)

    def _adapt(self, function: Callable[..., Any]) -> RewardFunction:
        name = getattr(function, "__name__", type(function).__name__)
        if name == "<lambda>" or any(name == other.name for other in self._functions):
            name = f"{name}#{len(self._functions) + 1}"
        known = next((ours for each, ours in _OURS.items() if each is function), None)
        if known is None:
            return RewardFunction(name, cloudpickle.dumps((function, self.kwargs)), form="tokens")
        if "tokenizer" not in self.kwargs:
            raise ConfigError(f"{known} reads text; give RLVRRewardModel the model's tokenizer as tokenizer=")
        ours = resolve_reward_function(known, allowed_modules=(), tags=self.kwargs.get("tags"))
        return RewardFunction(name, ours.target, arguments=ours.arguments, maximum=ours.maximum)
