"""Where prompts come from, and in which form they are given to the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config.base import Config
from rlhf_core.config.lint import LintConfig


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
    """How many problems, prompts or demonstrations each stage gets at most; the splits share no prompt.

    What a prompt may serve, its own hash decides: the evaluation with `data.heldout_fraction`, or a stage that learns,
    in proportion to the sizes here. 0 is for a stage that does not run.
    """

    sft: int = Field(384, ge=0)
    preferences: int = Field(96, ge=0)
    """Prompts for which the SFT model's own samples become pairs; none are drawn where pairs are given."""
    ppo: int = Field(256, ge=0)
    evaluation: int = Field(100, ge=0)
    """At least two, so that there is an interval."""
    development: int = Field(0, ge=0)
    """Held-out problems on which `ppo.evaluate_every` measures; the evaluation has none of them, and fewer prompts for
    them."""

    @model_validator(mode="after")
    def _an_interval(self) -> Self:
        if self.evaluation == 1:
            raise ValueError(
                "data.splits.evaluation is 1, but an interval needs at least 2 problems; 0 is for no evaluation"
            )
        return self


class SourceConfig(Config):
    """Rows of one origin."""

    path: str = Field(min_length=1)
    """File (JSON lines, JSON, CSV, Parquet; also .gz), directory, glob, `s3://` address, or hub name (`owner/name`)."""
    weight: float | None = Field(None, gt=0)
    """Share in a mixture, against the weights of the other sources; None for all: every row of each, as many as there
    are."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column holds which of our fields, such as {question: problem, answer: solution}."""
    limit: int | None = Field(None, ge=1)
    """Take the first rows only."""
    subset: str | None = None
    """Of a hub dataset that has several."""
    split: str = "train"
    """Of a hub dataset, and of a directory whose files are named for splits."""
    revision: str | None = None
    """Of a hub dataset; None takes the newest."""


class ArrivalsConfig(Config):
    """What a night learns from sources that grow: each row once, and old ones beside the new if that is said here."""

    window_nights: int | None = Field(None, ge=1)
    """Learn again what the last nights learnt: 7 takes tonight's rows and those of the six nights before."""
    window_days: float | None = Field(None, gt=0)
    """The same by time: what nights of the last days learnt."""
    replay: float = Field(0.0, ge=0, lt=1)
    """Share of older rows among tonight's, drawn at random from all nights before the window."""
    min_rows: int = Field(1, ge=1)
    """New rows to learn with which a night begins; where there are fewer, they wait for the next."""
    compared_rows: int = Field(20_000, ge=0)
    """Rows of each role that the last nights learnt, with which new ones are compared: what nearly repeats one of them
    is told, dropped or refused as `data.lint.repeated` says. A thousand take a fifth of a second."""
    max_bad_files: float = Field(0.5, ge=0, le=1)
    """Share of the new files that may be left out as unreadable; where more are, the run stops."""
    settle_s: float = Field(60.0, ge=0)
    """A file that was written later than so many seconds ago may not be whole yet, and waits for the next night.

    Objects of a bucket and datasets of the hub appear whole: for them it has no effect.
    """

    @model_validator(mode="after")
    def _one_window(self) -> Self:
        if self.window_nights is not None and self.window_days is not None:
            raise ValueError("data.arrivals.window_nights and data.arrivals.window_days exclude each other; set one")
        return self


def _as_sources(value: Any) -> Any:
    """Let a path stand for a source, and one source for a list of one."""
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple({"path": each} if isinstance(each, str) else each for each in listed)


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_sources)]


class DataConfig(Config):
    """Where prompts, answers, demonstrations and preferences come from.

    PPO's prompts and the held-out ones are drawn from the first that is set of `task`, `problems`, `prompts`,
    `preferences` and `demonstrations`; SFT learns `demonstrations`, else what those same rows demonstrate.
    """

    task: str | None = None
    """A reasoning-gym task by name (`composite` for several); None takes files."""
    task_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    problems: Sources = ()
    """Questions with answers that a verifier can compare with."""
    prompts: Sources = ()
    """Prompts without answers; only a reward model or reward functions can judge responses to them."""
    demonstrations: Sources = ()
    """What supervised fine-tuning learns: prompts with a response, or conversations."""
    preferences: Sources = ()
    """Pairs of a chosen and a rejected response; empty samples pairs from the SFT model."""
    evaluation: Sources = ()
    """Held-out problems or prompts of their own; empty holds some of the others out."""
    verifier: str | None = None
    """Who says whether an answer is right: `exact`, `gsm8k_reward_fn`, `math_competition_reward_fn`,
    `reasoning_gym:<task>` or `package.module:function`; None takes the task's own scorer, and `exact` for
    problems in files."""
    arrivals: ArrivalsConfig | None = None
    """Set (`{}` does): sources grow, and a night learns what has arrived since the last one (docs/data.md). None: each
    run learns all that its sources hold."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What becomes of a row that cannot be read: an error (of its file alone, where data arrive), or it is counted,
    named and left out."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """The same of a row that is longer than its stage's limit."""
    lint: LintConfig = LintConfig()
    """What becomes of rows that can be read and seem to have a fault: a word for all rules (`warn`, `refuse`, `drop`,
    `off`), or for each."""
    heldout_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the prompts that are held out for evaluation, by the hash of each, and never learnt from, in whichever
    set they stand; no effect where `evaluation` is given. Raised later, it holds out what was learnt before."""
    rotate_evaluation: bool = False
    """Each run that trains is evaluated on the next `splits.evaluation` of the held-out problems, in an order of their
    hashes, beginning anew after the last. Of a generated task, ten nights' problems are held out."""
    splits: Annotated[SplitsConfig, BeforeValidator(lambda value: {} if value is None else value)] = SplitsConfig()
    """null drops what a preset says of them."""

    @model_validator(mode="after")
    def _one_source_of_problems(self) -> Self:
        if self.task is not None and (self.problems or self.prompts):
            raise ValueError(
                "data.task and data.problems or data.prompts exclude each other; set data.task to null to take files"
            )
        if self.problems and self.prompts:
            raise ValueError("set data.problems or data.prompts, not both: prompts have no answers to verify")
        if self.task is None and not (self.problems or self.prompts or self.demonstrations or self.preferences):
            raise ValueError(
                "there is no data: set data.task, or one of data.problems, data.prompts, data.demonstrations and "
                "data.preferences"
            )
        return self

    @model_validator(mode="after")
    def _parameters_of_a_task(self) -> Self:
        if self.task is None and self.task_parameters:
            raise ValueError("data.task_parameters are a task's, but data.task is null; set the one or drop the other")
        return self

    @model_validator(mode="after")
    def _arrivals_take_every_row(self) -> Self:
        for role in ("problems", "prompts", "demonstrations", "preferences") if self.arrivals is not None else ():
            for source in getattr(self, role):
                given = [name for name in ("weight", "limit") if getattr(source, name) is not None]
                if given:
                    raise ValueError(
                        f"data.{role} gives {source.path} a {given[0]}, but with data.arrivals every row is learnt "
                        f"once; drop the {given[0]}"
                    )
        return self

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> Self:
        for role in ("problems", "prompts", "demonstrations", "preferences", "evaluation"):
            sources = getattr(self, role)
            if len({source.weight is None for source in sources}) > 1:
                raise ValueError(f"data.{role} mixes sources with and without a weight; give all of them one, or none")
        return self
