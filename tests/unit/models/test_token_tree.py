"""Rows as branches of a tree: the same numbers and gradients as row by row, from as many tokens as there are."""

from __future__ import annotations

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from rlhf_core.config import LoRAConfig
from rlhf_core.models import token_tree
from rlhf_core.models.actor import response_statistics
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.token_tree import each_by_itself, hidden_states, tree_of
from rlhf_core.models.trunk import autocast, checkpoint_gradients, disable_dropout, trunk_of
from rlhf_core.supervised.batches import MaskedTokens, token_batch
from rlhf_core.supervised.step import token_loss
from tests.tiny_llama import tiny_llama
from tests.unit.models.architectures import tiny_causal_lm

CPU = torch.device("cpu")
COMMON, OWN, ACTIONS = 6, 5, 4
"""Tokens that all prompts begin with, and of a prompt's own."""


def rows() -> tuple[Tensor, Tensor]:
    """Return six rows, of which two have a prompt in common and two are one, padded on either side; and their mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 250, (6, COMMON + OWN + ACTIONS), generator=generator)
    ids[:, :COMMON] = ids[0, :COMMON]
    ids[2, : COMMON + OWN] = ids[1, : COMMON + OWN]
    ids[5] = ids[4]
    padded, mask = torch.zeros(6, ids.shape[1] + 3, dtype=torch.long), torch.zeros(6, ids.shape[1] + 3).bool()
    for row, (begin, cut) in enumerate([(3, 0), (0, 0), (1, 0), (2, 4), (3, 1), (3, 1)]):
        end = begin + ids.shape[1] - cut
        padded[row, begin:end], mask[row, begin:end] = ids[row, : ids.shape[1] - cut], True
    return padded, mask


def learnt(model: nn.Module, kind: torch.dtype = torch.float32) -> list[Tensor]:
    """Return what is said of the rows, and the gradients of all weights, of a policy and of a critic."""
    ids, mask = rows()
    model.zero_grad()
    critic = Critic(trunk_of(model))  # type: ignore[arg-type]
    counts = mask[:, -ACTIONS:] & mask[:, -ACTIONS - 1 : -1]
    weights = torch.linspace(0.5, 2.0, len(ids))[:, None]
    with autocast(CPU, kind):
        said = response_statistics(
            model,  # type: ignore[arg-type]
            sequences=ids, attention_mask=mask, num_actions=ACTIONS, temperature=0.7, entropy_needs_grad=True,
        )  # fmt: skip
        states = hidden_states(critic.trunk, ids, mask)
    found = [said.logprobs * counts, said.entropy * counts, states.float() * mask[..., None]]
    (weights * (found[0] + 0.1 * found[1])).sum().backward(retain_graph=True)
    (found[2] * torch.linspace(-1.0, 1.0, states.shape[-1])).sum().backward()
    return [*(each.detach() for each in found), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def furthest(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, in parts of a tensor's largest number."""
    assert len(found) == len(expected) > 3
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("worth_a_call", "groups"), [(4096, [6]), (30, [4, 1, 1]), (0, [3, 2, 1])])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_numbers_and_gradients_are_those_of_the_rows(
    architecture: str, checkpointing: bool, worth_a_call: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_tree, "WORTH_A_CALL", worth_a_call)
    model = tiny_causal_lm(architecture)
    disable_dropout(model)
    model.train()
    if checkpointing:
        checkpoint_gradients(model)
    tree = tree_of(model, *rows())
    assert tree is not None
    assert [count for count, _ in tree.groups] == groups
    found = learnt(model)
    with each_by_itself():
        assert tree_of(model, *rows()) is None
        expected = learnt(model)
    assert furthest(found, expected) < 1e-5


def test_in_bfloat16_they_are_as_near_to_exact_ones() -> None:
    model = tiny_llama(initializer_range=0.2)
    found = learnt(model, torch.bfloat16)
    with each_by_itself():
        exact, plain = learnt(model), learnt(model, torch.bfloat16)
    for one, other, right in zip(found, plain, exact, strict=True):
        assert (one - right).norm() <= 1.5 * (other - right).norm() + 1e-3 * right.norm()


def test_adapters_see_the_same() -> None:
    model = tiny_llama()
    attach_lora(model, LoRAConfig(r=4, alpha=8.0), seed=0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(1))
    found = learnt(model)
    with each_by_itself():
        assert furthest(found, learnt(model)) < 1e-5


def test_a_token_after_the_same_tokens_goes_through_the_model_once_and_padding_never() -> None:
    model, (ids, mask) = tiny_llama(), rows()
    read = []
    model.model.embed_tokens.register_forward_hook(lambda _, given, __: read.append(given[0].numel()))
    branches = {tuple(row[row_mask][: end + 1].tolist()) for row, row_mask in zip(ids, mask, strict=True)
                for end in range(int(row_mask.sum()))}  # fmt: skip
    hidden_states(model.model, ids, mask)
    assert read == [len(branches)] == [COMMON + 5 * OWN - OWN + 3 * ACTIONS + 3]
    samples = torch.cat([ids[:1, 3:].repeat(8, 1), torch.arange(8)[:, None] + 3], dim=1)
    hidden_states(model.model, samples, torch.ones_like(samples, dtype=torch.bool))
    assert read[1:] == [COMMON + OWN + ACTIONS + 8]


def test_learning_twice_gives_the_same_bits() -> None:
    model = tiny_llama(initializer_range=0.2, hidden_size=512)
    prompt = torch.arange(3, 23).repeat(16, 1)
    ids = torch.cat([prompt, torch.randint(3, 250, (16, 16), generator=torch.Generator().manual_seed(0))], dim=1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = []
        for _ in range(5):
            model.zero_grad()
            said = response_statistics(
                model, sequences=ids, attention_mask=mask, num_actions=16, temperature=1.0, entropy_needs_grad=False
            )
            said.logprobs.sum().backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


def test_beside_a_row_its_own_first_and_last_tokens_are_read() -> None:
    model, (ids, mask) = tiny_llama(), rows()
    states = hidden_states(model.model, ids, mask)
    for row, own in enumerate(mask):
        first, last = int(own.long().argmax()), len(own) - 1 - int(own.flip(0).long().argmax())
        assert (states[row, :first] == states[row, first]).all()
        assert (states[row, last:] == states[row, last]).all()


def test_demonstrations_lose_what_they_lose_row_by_row() -> None:
    ids, mask = rows()
    own = [row[here].tolist() for row, here in zip(ids, mask, strict=True)]
    batch = token_batch([MaskedTokens(row, [place >= COMMON + OWN for place in range(len(row))]) for row in own])
    model = tiny_llama(initializer_range=0.2)

    def loss() -> float:
        return token_loss(model, batch, denominator=1.0, device=CPU, autocast_dtype=torch.float32).item()

    found = loss()
    with each_by_itself():
        assert found == pytest.approx(loss(), rel=1e-6)
    moved = batch._replace(position_ids=batch.position_ids + 5)
    assert loss() == found
    whole = token_loss(model, moved, denominator=1.0, device=CPU, autocast_dtype=torch.float32)
    with each_by_itself():
        assert whole == token_loss(model, moved, denominator=1.0, device=CPU, autocast_dtype=torch.float32)


def test_what_a_tree_cannot_be_is_computed_row_by_row() -> None:
    ids, mask = rows()
    assert tree_of(tiny_causal_lm("gpt2"), ids, mask) is None
    assert tree_of(tiny_causal_lm("mistral"), ids, mask) is None  # a token sees a window
    drops = tiny_causal_lm("qwen2")
    assert tree_of(drops.eval(), ids, mask) is not None
    assert tree_of(drops.train(), ids, mask) is None  # each row draws for itself
    model = tiny_llama()
    attach_lora(model, LoRAConfig(r=4, dropout=0.1), seed=0)
    assert tree_of(model.train(), ids, mask) is None
    model = tiny_llama()
    assert tree_of(model, ids, mask & (torch.arange(len(mask)) > 0)[:, None]) is None  # a row of padding alone
    prompts = get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert tree_of(prompts, ids, mask) is None
    gap = mask.clone()
    gap[0, 7] = False
    assert tree_of(model, ids, gap) is None
    different = torch.arange(3, 15).view(3, 4)
    assert tree_of(model, different, torch.ones_like(different, dtype=torch.bool)) is None  # nothing is saved
