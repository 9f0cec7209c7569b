"""SFT learns responses, and responses only."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import LoRAConfig, SFTConfig
from rlhf_core.data.conversation import encode_conversation
from rlhf_core.errors import DataError, TrainingError
from rlhf_core.supervised.sft import train_sft
from rlhf_core.training import micro_batches
from tests.tiny_llama import tiny_llama, tiny_tokenizer

EXAMPLES = [
    ([5, 6, 7], [10, 11, 2]),
    ([8], [12, 2]),
    ([5, 9], [13, 14, 15, 16, 2]),
    ([7, 7, 7, 7], [17, 2]),
]
CONFIG = SFTConfig(epochs=1, batch_size=4, micro_batch_size=2, lr=1e-3, warmup_steps=0)


def train(config: SFTConfig = CONFIG, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple:
    model = tiny_llama(initializer_range=0.2)
    return model, train_sft(model, EXAMPLES, config, seed=seed, autocast_dtype=dtype).history


def mean_response_loss() -> float:
    """Each example alone, without padding, by the whole log-softmax."""
    model, total, tokens = tiny_llama(initializer_range=0.2), 0.0, 0
    for prompt, response in EXAMPLES:
        whole = torch.log_softmax(model(torch.tensor([[*prompt, *response]])).logits[0], dim=-1)
        for place, token in enumerate(response, start=len(prompt)):
            total -= whole[place - 1, token].item()
            tokens += 1
    return total / tokens


def test_the_first_loss_is_the_mean_over_response_tokens_alone() -> None:
    _, history = train()
    assert history[0]["loss"] == pytest.approx(mean_response_loss(), rel=1e-5)
    assert history[0]["tokens"] == 12


def test_micro_batches_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for size, pass_tokens, most in ((1, 64, 2048), (4, 64, 2048), (4, 0, 2048), (4, 64, 10)):
        monkeypatch.setattr(micro_batches, "PASS_TOKENS", pass_tokens)
        monkeypatch.setattr(micro_batches, "MOST_TOKENS", most)
        model, history = train(CONFIG.model_copy(update={"micro_batch_size": size}))
        weights.append((model.model.layers[0].mlp.up_proj.weight, history[0]["grad_norm"]))
    for other in weights[1:]:
        assert weights[0][1] == pytest.approx(other[1], rel=1e-4)
        torch.testing.assert_close(weights[0][0], other[0], rtol=1e-3, atol=1e-4)


def test_the_demonstrations_are_learnt() -> None:
    config = CONFIG.model_copy(update={"epochs": 30, "lr": 3e-3, "warmup_steps": 2})
    model, history = train(config)
    assert len(history) == 30
    assert history[-1]["loss"] < 0.05
    for prompt, response in EXAMPLES:
        ids = list(prompt)
        for _ in response:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert ids[len(prompt) :] == response


def test_every_example_is_seen_once_per_epoch_and_the_last_batch_may_be_smaller() -> None:
    seen: list[dict[str, float]] = []
    config = CONFIG.model_copy(update={"batch_size": 3, "epochs": 2})
    history, _ = train_sft(tiny_llama(), EXAMPLES, config, seed=1, autocast_dtype=torch.float32, on_step=seen.append)
    assert seen == history
    assert [step["step"] for step in history] == [1, 2, 3, 4]
    for first, second in (history[:2], history[2:]):
        assert first["tokens"] + second["tokens"] == 12


def test_the_seed_decides_the_result_and_the_global_random_state_stays() -> None:
    state = torch.get_rng_state()
    config = CONFIG.model_copy(update={"batch_size": 1, "micro_batch_size": 1, "lora": LoRAConfig(r=2, dropout=0.2)})
    runs = [train(config, seed=seed)[1] for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert runs[0] == runs[1] != runs[2]


def test_with_adapters_the_base_stays_as_it_is() -> None:
    model, _ = train(CONFIG.model_copy(update={"lora": LoRAConfig(r=2)}))
    base = dict(tiny_llama(initializer_range=0.2).named_parameters())
    changed = 0
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            changed += bool(parameter.requires_grad)
        else:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])
    assert changed == 2 * 2 * 7  # A and B of seven linear layers in each of two blocks


def test_bfloat16_autocast_gives_about_the_same_loss() -> None:
    _, history = train(dtype=torch.bfloat16)
    assert history[0]["loss"] == pytest.approx(mean_response_loss(), rel=0.02)


def test_the_model_is_left_in_evaluation_mode() -> None:
    model, _ = train()
    assert not model.training


def test_a_demonstration_that_is_too_long_is_named_before_any_training() -> None:
    model = tiny_llama()
    with pytest.raises(DataError, match=r"demonstration 3 of 4 has 7 tokens, but sft.max_length is 6"):
        train_sft(model, EXAMPLES, CONFIG.model_copy(update={"max_length": 6}), seed=0, autocast_dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "at least one demonstration"),
        ([([1], [2]), ([1], [])], "demonstration 2 of 2 has an empty"),
        ([([1, 2], [False, False])], "demonstration 1 of 1 has no token to learn"),
        ([([1, 2, 3], [False, True])], "a loss mask of another length"),
    ],
)
def test_nothing_to_learn_is_refused(examples: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_sft(tiny_llama(), examples, CONFIG, seed=0, autocast_dtype=torch.float32)


def turns(*, answers: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    """Two turns of a conversation: the assistant's tokens are those of `answers`."""
    ids = [5, 6, 20, 21, 2, 7, 22, 2]
    return ids, [token in answers for token in ids]


def test_all_turns_of_the_assistant_are_learnt_and_nothing_else() -> None:
    conversation, model = turns(answers=(20, 21, 2, 22)), tiny_llama(initializer_range=0.2)
    history, _ = train_sft(model, [conversation, EXAMPLES[1]], CONFIG, seed=0, autocast_dtype=torch.float32)
    untrained, total = tiny_llama(initializer_range=0.2), 0.0
    for ids, learnt in (conversation, ([8, 12, 2], [False, True, True])):
        whole = torch.log_softmax(untrained(torch.tensor([ids])).logits[0], dim=-1)
        total -= sum(whole[t - 1, ids[t]].item() for t in range(len(ids)) if learnt[t])
    assert history[0]["tokens"] == 5 + 2
    assert history[0]["loss"] == pytest.approx(total / 7, rel=1e-5)


def test_a_conversation_is_learnt_where_its_template_says_that_the_assistant_speaks() -> None:
    tokenizer = tiny_tokenizer()
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "fgh"},
    ]
    conversation = encode_conversation(messages, tokenizer)
    config = CONFIG.model_copy(update={"packing": True, "max_length": 200})
    model = tiny_llama(initializer_range=0.2)
    history, _ = train_sft(model, [conversation, conversation], config, seed=0, autocast_dtype=torch.float32)
    assert history[0]["tokens"] == 2 * (3 + 4)  # "cd" and "fgh", a token a byte, each with its end
    ids, learnt = conversation
    assert tokenizer.decode([t for t, said in zip(ids, learnt, strict=True) if said]) == "cd<|im_end|>fgh<|im_end|>"
    whole = torch.log_softmax(tiny_llama(initializer_range=0.2)(torch.tensor([ids])).logits[0], dim=-1)
    expected = -sum(whole[t - 1, ids[t]].item() for t in range(len(ids)) if learnt[t]) / 7
    assert history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_prompt_with_its_response_and_its_mask_are_two_forms_of_one_demonstration() -> None:
    masked = [([*p, *r], [False] * len(p) + [True] * len(r)) for p, r in EXAMPLES]
    runs = [
        train_sft(tiny_llama(initializer_range=0.2), form, CONFIG, seed=0, autocast_dtype=torch.float32).history
        for form in (EXAMPLES, masked)
    ]
    assert runs[0] == runs[1]


def test_what_nothing_predicts_is_never_learnt() -> None:
    first_too = ([5, 6], [True, True])
    history, _ = train_sft(tiny_llama(), [first_too], CONFIG, seed=0, autocast_dtype=torch.float32)
    assert history[0]["tokens"] == 1


def test_the_held_out_loss_is_that_of_the_model_after_each_epoch() -> None:
    config = CONFIG.model_copy(update={"batch_size": 2, "epochs": 3, "lr": 3e-3})
    history, _ = train_sft(
        tiny_llama(initializer_range=0.2),
        EXAMPLES[:3],
        config,
        seed=0,
        autocast_dtype=torch.float32,
        heldout=EXAMPLES[:3],
    )
    measured = [step["heldout_loss"] for step in history if "heldout_loss" in step]
    assert ["heldout_loss" in step for step in history] == [False, True] * 3
    assert measured[0] > measured[1] > measured[2]
    plain, _ = train_sft(tiny_llama(initializer_range=0.2), EXAMPLES[:3], config, seed=0, autocast_dtype=torch.float32)
    assert [step["loss"] for step in plain] == [step["loss"] for step in history], "measuring must not change training"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_computes_activations_twice_and_changes_no_number() -> None:
    runs, calls = [], []
    for active in (False, True):
        model = tiny_llama(initializer_range=0.2)
        seen: list[bool] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(True))
        config = CONFIG.model_copy(update={"gradient_checkpointing": active, "lora": LoRAConfig(r=2, dropout=0.3)})
        runs.append(train_sft(model, EXAMPLES, config, seed=0, autocast_dtype=torch.float32).history[0])
        calls.append(len(seen))
        assert not model.is_gradient_checkpointing
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)
    assert calls == [2, 4]  # two micro-batches


def test_tokens_of_another_tokenizer_are_named_before_any_training() -> None:
    with pytest.raises(DataError, match=r"demonstration 2 of 2's tokens hold the token id 259, but .* has 259 entries"):
        train_sft(tiny_llama(), [EXAMPLES[0], ([5], [259])], CONFIG, seed=0, autocast_dtype=torch.float32)


def test_weights_that_are_not_finite_stop_the_training() -> None:
    model = tiny_llama()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(TrainingError, match="language model's loss is nan"):
        train_sft(model, EXAMPLES, CONFIG, seed=0, autocast_dtype=torch.float32)
