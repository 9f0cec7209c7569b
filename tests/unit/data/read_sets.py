"""Sets as the reader hands them on, and a preset of small splits."""

from __future__ import annotations

from typing import Any

from rlhf_core.config import PipelineConfig, TemplateConfig
from rlhf_core.data import PreferencePair, Problem, PromptTemplate
from rlhf_core.data.preparing import TokenMeter
from rlhf_core.data.reading import ReadSet, RejectedRow, SourceFacts
from tests.tiny_llama import tiny_tokenizer

SIZES = {"sft": 6, "preferences": 4, "ppo": 8, "evaluation": 5}
CHATML = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def config(data: dict[str, Any], **changes: Any) -> PipelineConfig:
    """Return a preset on these data, with keys by name of their section."""
    values: dict[str, Any] = {
        "name": "tiny",
        "data": {"splits": SIZES, "heldout_fraction": 0.25, **data},
        "reward_model": {"pairs": 12},
        "template": {"prompt": CHATML},
        "ppo": {"prompts_per_episode": 8, "chunk_size": 8, "train_batch_size": 8, "micro_batch_size": 8},
        "evaluation": {"max_new_tokens": 40},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields} if isinstance(fields, dict) else fields
    return PipelineConfig.model_validate(values)


def template(**fields: Any) -> PromptTemplate:
    return PromptTemplate(tiny_tokenizer(), TemplateConfig(**(fields or {"prompt": CHATML})))


def meter() -> TokenMeter:
    return TokenMeter(template())


def read(rows: list[Any], path: str = "rows.jsonl", rejected: tuple[RejectedRow, ...] = (), copies: int = 0) -> ReadSet:
    count = len(rows) + len(rejected) + copies
    facts = SourceFacts(path, (path,), "JSON lines", count, len(rows), None)
    return ReadSet(tuple(rows), rejected, copies, (facts,), f"digest of {path}")


def problems(count: int, first: int = 0) -> list[Problem]:
    return [Problem(f"What is {n} and {n}?", str(2 * n)) for n in range(first, first + count)]


def prompts(count: int, first: int = 0) -> list[Problem]:
    return [Problem(f"Tell me of {n}.") for n in range(first, first + count)]


def demonstrations(count: int, first: int = 0) -> list[Problem]:
    return [Problem(f"Say {n}.", demonstration=f"I say {n}.") for n in range(first, first + count)]


def pairs(count: int, first: int = 0) -> list[PreferencePair]:
    return [
        PreferencePair(f"\n\nHuman: Ask {n}\n\nAssistant:", f"Kind {n}.", f"Rude {n}.")
        for n in range(first, first + count)
    ]
