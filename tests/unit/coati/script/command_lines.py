"""A command line of `train_ppo` that is right, to be spoilt by one flag at a time."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = {
    "chat_template": None,
    "system_message": None,
    "stop_ids": [2],
    "end_of_assistant": "<|im_end|>",
    "response_format_tags": {
        "think_start": {"text": "<think>", "num_occur": 1},
        "think_end": {"text": "</think>", "num_occur": 1},
        "answer_start": {"text": "<answer>", "num_occur": 1},
        "answer_end": {"text": "</answer>", "num_occur": 1},
    },
    "step_score_signal": "ки",  # some of coati's templates have these two
    "reward_signal": ["+", "-"],
}


def write_inputs(directory: Path, *, prompts: int = 8) -> Path:
    """Write prompts.jsonl and template.json; return the directory."""
    rows = [{"messages": [{"from": "human", "content": f"{n} + 1?"}], "gt_answer": str(n + 1)} for n in range(prompts)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "template.json").write_text(json.dumps(TEMPLATE))
    return directory


def right_flags(directory: Path) -> dict[str, str | None]:
    """Return the flags of a run by reward functions; None stands for a flag without a value."""
    return {
        "--pretrain": str(directory / "model"),
        "--prompt_dataset": str(directory / "prompts.jsonl"),
        "--conversation_template_config": str(directory / "template.json"),
        "--no_neural_reward_model": None,
        "--reward_functions": "gsm8k_reward_fn",
        "--save_path": str(directory / "out"),
    }


def as_arguments(flags: dict[str, str | None]) -> list[str]:
    """Return the flags as a command line's words."""
    return [word for flag, value in flags.items() for word in (flag, *([] if value is None else value.split(" ")))]
