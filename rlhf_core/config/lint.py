"""What becomes of the rows that a linter accuses, rule by rule."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from rlhf_core.config.base import Config

RowAction = Literal["off", "warn", "refuse", "drop"]
SetAction = Literal["off", "warn", "refuse"]


class LintConfig(Config):
    """What a run does about faults that its rows seem to have; a word alone, such as `drop`, is the default of all.

    `warn` tells them in log and report and changes nothing, `refuse` ends the run before anything is trained, `drop`
    leaves the accused rows out and counts them, `off` does not look. A rule that judges a set as a whole accuses no
    rows: `drop` as the default only warns there.
    """

    default: RowAction = "warn"
    """Of every rule that is not named below."""
    equal: RowAction | None = None
    """Both responses say the same, but for case, spaces and punctuation, or up to `reward_model.max_length`."""
    contradictory: RowAction | None = None
    """Pairs of one prompt that prefer in a circle, or equal problems with different answers."""
    repeated: RowAction | None = None
    """An earlier row says nearly the same."""
    overlap: RowAction | None = None
    """A prompt that is learnt from is nearly one that is held out."""
    echo: RowAction | None = None
    """A response repeats the prompt."""
    speakers: RowAction | None = None
    """A response goes on with the next turn of the user, or begins with a speaker's name."""
    answer: RowAction | None = None
    """The prompt holds the answer."""
    language: RowAction | None = None
    """A response is in another language than nearly all of the set."""
    template: RowAction | None = None
    """A text holds the marks of a chat template."""
    markup: RowAction | None = None
    """A text holds scripts, remote pictures, or characters that steer a terminal or turn text around."""
    encoding: RowAction | None = None
    """A text was decoded wrongly, such as "donâ€™t"."""
    cut: RowAction | None = None
    """A response ends in the middle of a sentence."""
    empty: RowAction | None = None
    """A response has neither letters nor digits."""
    length_bias: SetAction | None = None
    """The longer response is preferred too often, or too seldom."""
    flood: SetAction | None = None
    """One annotator, one pattern of prompts, or one response makes up too much of a set."""
    columns: SetAction | None = None
    """A column that is not read is nearly called as one of ours."""

    @model_validator(mode="before")
    @classmethod
    def _word_alone(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, dict):
            return {name: _switch(action) for name, action in value.items()}
        return {"default": _switch(value)} if isinstance(value, str | bool) else value

    def action(self, rule: str) -> RowAction:
        """Return what is done about a rule, by its name."""
        found: RowAction | None = getattr(self, rule)
        return found or self.default


def _switch(value: Any) -> Any:
    """Return the word for what YAML makes of an unquoted `off` and `on`."""
    return {False: "off", True: "warn"}[value] if isinstance(value, bool) else value
