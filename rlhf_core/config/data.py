"""Where prompts come from, and how they are put."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Positive


class TemplateConfig(Config):
    """How a prompt is put to the model, and how a response ends."""

    prompt: str | None = None
    """Text around `{prompt}`; None takes the tokenizer's own chat template."""
    stop: tuple[str, ...] = ()
    """Tokens that end a response besides the tokenizer's end-of-sequence token."""
    answer_tag: str = "answer"
    """The verifier reads what stands between `<answer>` and `</answer>`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.prompt is not None and self.prompt.count("{prompt}") != 1:
            raise ValueError(f"template.prompt must hold {{prompt}} once, but it is {self.prompt!r}")
        return self


class SplitsConfig(Config):
    """How many problems each stage gets; the splits share no prompt."""

    sft: Positive = 384
    preferences: Positive = 96
    ppo: Positive = 256
    evaluation: int = Field(100, ge=2)
    """At least two, so that there is an interval."""


class DataConfig(Config):
    """Where prompts, answers and preferences come from."""

    task: str | None = "number_sorting"
    """A reasoning-gym task by name; None when `problems` names a file."""
    task_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    problems: str | None = None
    """JSON lines (also .gz) of {"question", "answer"}, as GSM8K's."""
    preferences: str | None = None
    """JSON lines (also .gz) of {"chosen", "rejected"}, as HH-RLHF's; None samples pairs from the SFT model."""
    splits: SplitsConfig = SplitsConfig()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.task is None) == (self.problems is None):
            raise ValueError("set exactly one of data.task and data.problems (set the other to null)")
        return self
