"""All rows, each with what it must reach and who else does the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.speed import data, growth, learning, logprobs, makers, padding, ppo, rollouts, starts, supervised
from bench.speed.measure import Found, Goal, Row, Run
from bench.speed.models import ARITHMETIC

GENERATE = "transformers' generate"
PLAIN = "logits and log_softmax in PyTorch"
PPO = "TRL's PPOTrainer"
PADDING: dict[str, Callable[[Run], Found]] = {
    "gsm8k_sft": partial(padding.sft, rows=data.gsm8k),
    "gsm8k_scoring": partial(padding.scoring, rows=data.gsm8k),
    "gsm8k_learning": partial(padding.learning, rows=data.gsm8k),
    "hh_sft": partial(padding.sft, rows=data.hh),
    "hh_reward": padding.reward,
    "hh_scoring": partial(padding.scoring, rows=data.hh),
    "hh_learning": partial(padding.learning, rows=data.hh),
}


def _faster(times: float) -> Goal:
    """Return the goal of a ratio: the peer's value over ours, of memory as of time."""
    return Goal("ratio", ">=", times)


ROWS = (
    Row("rollout", "s", _faster(3), rollouts.to_the_end, GENERATE),
    Row("rollout_adapters", "s", _faster(3), partial(rollouts.to_the_end, adapters=True), f"{GENERATE}, peft's layers"),
    Row("rollout_ragged", "s", _faster(4), rollouts.ragged, GENERATE),
    Row("rollout_shared_prompt", "s", _faster(5), rollouts.shared_prompt, f"{GENERATE}, num_return_sequences"),
    Row("rollout_until_stop", "s", _faster(3), rollouts.until_stop, f"{GENERATE} in our hf engine"),
    *(
        row
        for vocabulary in (49_152, 128_256)
        for row in (
            Row(f"logprobs_{vocabulary}", "s", _faster(2), partial(logprobs.seconds, vocabulary=vocabulary), PLAIN),
            Row(
                f"logprobs_{vocabulary}_memory", "MB", _faster(4), partial(logprobs.megabytes, vocabulary=vocabulary),
                PLAIN,
            ),
        )
    ),
    *(
        Row(f"padding_{name}", "share", Goal("value", ">=", 0.95), measure)
        for name, measure in PADDING.items()
    ),
    *(
        Row(f"{kind}_step_{lengths}", "s", _faster(2), partial(measure, lengths=lengths), peer)
        for kind, measure, peer in (
            ("sft", supervised.sft, "TRL's SFTTrainer; without TRL, transformers"),
            ("reward", supervised.reward, "TRL's RewardTrainer; without TRL, transformers"),
        )
        for lengths in ("quickstart", "hh")
    ),
    Row("ppo_step_bfloat16", "s", _faster(5), partial(ppo.seconds, dtype="bfloat16"), PPO),
    Row("ppo_step_float32", "s", _faster(1.5), partial(ppo.seconds, dtype="float32"), PPO),
    Row("ppo_step_adapters", "s", _faster(5), partial(ppo.seconds, dtype=ARITHMETIC, adapters=True), PPO),
    Row("ppo_step_adapters_memory", "MB", _faster(2), ppo.megabytes, PPO),
    Row("learning_step", "s", _faster(2.5), learning.step, "transformers with peft's layers and torch's AdamW"),
    Row("learning_step_compiled", "s", _faster(1.1), learning.compiled_step, "ours without compile_layers"),
    *(
        Row(f"growth_{name}", "slope", Goal("value", "<=", most), measure)
        for name, most, measure in (
            ("step_rows", 1.05, growth.batch),
            ("step_length", 1.2, growth.length),  # attention's own grows as the square
            ("step_weights", 1.05, growth.size),
            ("ledger_makers", 1.1, makers.ledger),
            ("episode_makers", 0.1, makers.episode),
        )
    ),
    Row("simulator", "share", Goal("value", "<=", 0.1), makers.simulator),
    Row("bring_up", "s", Goal("value", "<=", 8.0), starts.bring_up),
    Row("import_flows", "s", Goal("value", "<=", 2.0), starts.import_flows),
    Row("help", "s", Goal("value", "<=", 0.5), starts.print_help),
)  # fmt: skip
