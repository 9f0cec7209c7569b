"""coati's reward functions in coati's form: of token ids, for one response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_core.rewards.competition import math_competition_score
from rlhf_core.rewards.math_answers import gsm8k_score
from rlhf_core.rewards.structure import Tags, is_of_tag


def gsm8k_reward_fn(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    response_start: int,
    response_end: int,
    gt_answer: str | None,
    tokenizer: Any,
    tags: Tags | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return 10 for the right number in the right form, 1 for the form alone, else 0.

    Args:
        input_ids: [S], prompt and response.
        attention_mask: [S], True on tokens.
        response_start: place of the response's first token.
        response_end: place of its last token; one past it will do, as padding is not read.
        gt_answer: the reference, alone or after `####`; None scores 0.
        tokenizer: decodes the response.
        tags: the form of a response, from the conversation template; None is coati's.
        **kwargs: what other functions of the same model take; only `stop_ids` is looked at.
    """
    place = (response_start, response_end, tokenizer)
    text = response_text(input_ids, attention_mask, *place, tags=tags, stop_ids=kwargs.get("stop_ids"))
    return torch.tensor(gsm8k_score("", text, gt_answer, tags=tags), device=input_ids.device)


def math_competition_reward_fn(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    response_start: int,
    response_end: int,
    gt_answer: str | None,
    tokenizer: Any,
    tags: Tags | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return 10 for the right answer in the right form, 1 for the form alone, else 0.

    Called by itself it runs here, with a limit of two seconds a comparison, in the main thread alone;
    `RLVRRewardModel` runs it in a process that can be killed.

    Args:
        input_ids: [S], prompt and response.
        attention_mask: [S], True on tokens.
        response_start: place of the response's first token.
        response_end: place of its last token; one past it will do, as padding is not read.
        gt_answer: the reference; None scores 0.
        tokenizer: decodes the response.
        tags: the form of a response, from the conversation template; None is coati's.
        **kwargs: what other functions of the same model take; only `stop_ids` is looked at.
    """
    place = (response_start, response_end, tokenizer)
    text = response_text(input_ids, attention_mask, *place, tags=tags, stop_ids=kwargs.get("stop_ids"))
    return torch.tensor(math_competition_score("", text, gt_answer, tags=tags), device=input_ids.device)


def response_text(
    input_ids: Tensor | Sequence[int],
    attention_mask: Tensor | Sequence[int],
    start: int,
    end: int,
    tokenizer: Any,
    *,
    tags: Tags | None = None,
    stop_ids: Sequence[int] | None = None,
) -> str:
    """Return a response's text without padding and the tokens that ended it; other special tokens are spelt out.

    Every function reads its response through this one, so none is off by a token. A tag that is a token is never
    left out, not even if generation stops at it.

    Args:
        input_ids: [S], prompt and response.
        attention_mask: [S], True on tokens.
        start: place of the response's first token.
        end: place of its last token, or one past it.
        tokenizer: decodes.
        tags: the form of a response; None is coati's.
        stop_ids: what ends a response besides the tokenizer's own end and padding; None takes every special token.
    """
    ids, mask = torch.as_tensor(input_ids), torch.as_tensor(attention_mask).bool()
    kept = ids[start : end + 1][mask[start : end + 1]].tolist()
    own = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    ends = own | set(tokenizer.all_special_ids if stop_ids is None else stop_ids)
    while kept and kept[-1] in ends and not is_of_tag(kept[-1], tokenizer, tags):
        kept.pop()
    text: str = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
