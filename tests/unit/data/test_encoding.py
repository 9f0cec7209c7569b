"""Which pairs a reward model is trained on and which it is measured on; what is kept of them as token ids."""

from __future__ import annotations

import pytest

from rlhf_core.config import RewardModelConfig, TemplateConfig
from rlhf_core.data import PreferencePair, PromptTemplate
from rlhf_core.data.encoding import encode_pairs
from rlhf_core.data.preferences import refuse_shared_prompts, split_pairs
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer


def test_conversations_of_which_one_continues_the_other_are_on_one_side() -> None:
    openings = [f"\n\nHuman: q{row}\n\nAssistant:" for row in range(30)]
    longer = [f"{opening} a\n\nHuman: and?\n\nAssistant:" for opening in openings]
    plain = [f"p{row}" for row in range(30)]  # p1 begins p10, and is no conversation that it continues
    some = [PreferencePair(prompt, "good", "bad") for prompt in (*openings, *longer, *plain)]
    split = split_pairs(some, RewardModelConfig(pairs=None), seed=0)
    heldout = {pair.prompt for pair in split.heldout}
    assert len(split.training) + len(split.heldout) == 90, "all pairs are used"
    assert 0 < len(heldout & {*openings}) < 30
    assert [prompt in heldout for prompt in openings] == [prompt in heldout for prompt in longer]
    assert len({prompt in heldout for prompt in plain if prompt.startswith("p1")}) == 2


def test_prompts_that_differ_in_case_alone_are_on_one_side() -> None:
    some = [PreferencePair(prompt, "good", "bad") for row in range(30) for prompt in (f"q{row}", f"Q{row} ")]
    split = split_pairs(some, RewardModelConfig(), seed=0)
    sides = [{pair.prompt.casefold().strip() for pair in side} for side in split]
    assert sides[0].isdisjoint(sides[1])
    with pytest.raises(DataError, match="the training pairs and the held-out ones share 1 prompt, first 'Q0 '"):
        refuse_shared_prompts(some[:1], some[1:2])


def test_what_is_known_of_a_pairs_form_stays_with_it() -> None:
    template = PromptTemplate(tiny_tokenizer(), TemplateConfig(prompt="{prompt}"))
    some = [PreferencePair("q", "a", "b", both_well_formed=form) for form in (True, False, None)]
    assert [pair.both_well_formed for pair in encode_pairs(some, template)] == [True, False, None]
