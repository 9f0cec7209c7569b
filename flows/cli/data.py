"""`rlhf data`: look at data before a run does."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.data import PromptTemplate
    from rlhf_core.data.preparing import Checked

app = App(name="data", help="Look at data before a run does.")
Json = Annotated[bool, Parameter(name="--json", negative="")]
Columns = Annotated[tuple[str, ...], Parameter(name="--column", negative="")]
DEFAULT = "quickstart"
Role = Literal["problems", "prompts", "demonstrations", "preferences"]
Overlap = tuple[str, str, list[str]]
"""The paths of two sets, and the prompts that they share."""


@app.command
def check(
    *paths: str,
    preset: str | None = None,
    column: Columns = (),
    role: Role | None = None,
    subset: str | None = None,
    split: str = "train",
    as_json: Json = False,
) -> int:
    """Show what sets hold, and what of them cannot be used, or with a preset what its run would refuse; needs no stack.

    The exit status is 1 where something would be refused. Several sets are also checked for prompts that they share.

    Args:
        paths: files, directories, globs, `s3://` addresses or hub names.
        preset: judge as a run of this preset would, by its limits, splits and verifier; without one, a set is judged by
            itself, and what the limits of the quickstart would leave out is only told.
        column: OURS=THEIRS, which column holds which of our fields; may be repeated.
        role: what the sets are for; found out when left out.
        subset: of a hub dataset that has several.
        split: of a hub dataset, and of a directory whose files are named for splits.
        as_json: print JSON.

    Raises:
        ConfigError: no set is named, there is no such preset, or a column is not given as OURS=THEIRS.
    """
    from flows.presets import draft_of
    from infra.settings import settings
    from rlhf_core.config import SourceConfig
    from rlhf_core.data.preparing import Standard, check_source
    from rlhf_core.errors import ConfigError
    from tasks.context import data_access

    if not paths:
        raise ConfigError("name at least one set to check, such as `rlhf data check train.jsonl`")
    draft, columns, known = draft_of(preset or DEFAULT, data=paths[0]), _columns(column), settings()
    config = draft.config
    standard = Standard(config, preset is not None, _template(config), known.reward_modules, draft.sizes)
    checked = []
    for path in paths:
        source = SourceConfig(path=path, columns=columns, subset=subset, split=split)
        checked.append(check_source(standard, source, role, access=data_access(known), alone=len(paths) == 1))
    overlaps = _overlaps(checked)
    if as_json:
        _write_json(checked, overlaps, preset)
    else:
        _show(checked, overlaps, preset, counted=config.model.path if standard.template is not None else None)
    return int(bool(overlaps) or any(each.refusals for each in checked))


def _overlaps(checked: Sequence[Checked]) -> list[Overlap]:
    from rlhf_core.data.preparing import shared_prompts

    return [
        (one.path, other.path, shared)
        for place, one in enumerate(checked)
        for other in checked[place + 1 :]
        if (shared := shared_prompts(one, other))
    ]


def _columns(given: Sequence[str]) -> dict[str, str]:
    from rlhf_core.errors import ConfigError

    wrong = next((each for each in given if not all(each.partition("="))), None)
    if wrong is not None:
        raise ConfigError(f"--column {wrong!r} must be OURS=THEIRS, such as question=problem")
    return {ours: theirs for ours, _, theirs in (each.partition("=") for each in given)}


def _template(config: PipelineConfig) -> PromptTemplate | None:
    """Return the preset's template with its tokenizer, where the model is on this machine or comes with us."""
    from infra.settings import settings
    from rlhf_core.data import PromptTemplate
    from rlhf_core.errors import ModelError
    from rlhf_core.models.loading import find_local, load_tokenizer, locate_model
    from rlhf_core.models.locating import PACKAGED

    known = settings()
    try:
        packaged = config.model.path in PACKAGED
        locate = locate_model if packaged else find_local
        directory = locate(config.model.path, models_dir=known.models_dir)
        return PromptTemplate(load_tokenizer(directory), config.template) if directory is not None else None
    except ModelError:
        return None


def _write_json(checked: Sequence[Checked], overlaps: Sequence[Overlap], preset: str | None) -> None:
    facts = {
        "preset": preset,
        "sets": [each.as_dict() for each in checked],
        "overlaps": [
            {"sets": [one, other], "prompts": len(shared), "example": shared[0]} for one, other, shared in overlaps
        ],
        "refused": bool(overlaps) or any(each.refusals for each in checked),
    }
    sys.stdout.write(json.dumps(facts, indent=1) + "\n")


def _show(checked: Sequence[Checked], overlaps: Sequence[Overlap], preset: str | None, *, counted: str | None) -> None:
    from rich.console import Console

    from flows.cli.data_screen import show_overlap, show_set, show_verdict

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for each in checked:
        show_set(console, each, preset=preset or DEFAULT, counted=counted)
    for one, other, shared in overlaps:
        show_overlap(console, one, other, shared)
    show_verdict(console, [sentence for each in checked for sentence in each.refusals], bool(overlaps), preset)
