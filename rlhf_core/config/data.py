"""Where prompts come from, and how they are put."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Positive


class TagConfig(Config):
    """One tag of a response's form."""

    text: str = Field(min_length=1)
    num_occur: int = Field(1, ge=0)
    """How often it must occur."""


class TemplateConfig(Config):
    """How a prompt is put to the model, and how a response ends."""

    prompt: str | None = None
    """Text around `{prompt}`; None takes the chat template."""
    chat_template: str | None = None
    """A chat template (Jinja); None takes the tokenizer's own."""
    system_message: str | None = None
    """What the system turn says, before every prompt of the chat template; None adds no such turn."""
    stop: tuple[str, ...] = ()
    """Tokens that end a response besides the tokenizer's end-of-sequence token."""
    stop_ids: tuple[int, ...] = ()
    """The same by number, as coati's templates name them."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response."""
    answer_tag: str = "answer"
    """The verifier reads what stands between `<answer>` and `</answer>`."""
    tags: dict[str, TagConfig] | None = None
    """The form that reward functions want of a response (coati's `response_format_tags`, in the order of the
    response, `answer_start` and `answer_end` among them); None wants the answer's two tags."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.prompt is not None and self.prompt.count("{prompt}") != 1:
            raise ValueError(f"template.prompt must hold {{prompt}} once, but it is {self.prompt!r}")
        return self

    @model_validator(mode="after")
    def _one_template(self) -> Self:
        if self.prompt is not None and (self.chat_template is not None or self.system_message is not None):
            raise ValueError(
                "template.prompt leaves no place for template.chat_template and template.system_message; "
                "set either the first or the others"
            )
        return self

    @model_validator(mode="after")
    def _tags_of_the_answer(self) -> Self:
        if self.tags is not None and not {"answer_start", "answer_end"} <= set(self.tags):
            raise ValueError("template.tags must name answer_start and answer_end, between which the answer stands")
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
