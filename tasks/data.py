"""Other people's data and tasks' problems: read, split, reported on, and stored by content."""

from __future__ import annotations

import json
import time
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from infra.artifacts.ref import enumerate_names, parse_reference
from rlhf_core.config import DataConfig, PipelineConfig
from rlhf_core.config.lint import LintConfig
from rlhf_core.config.ppo import BATCHES
from rlhf_core.config.sizes import SPLITS as SIZES_OF_SPLITS
from rlhf_core.config.sizes import Sizes, as_they_are, settle, shortage, told_changes, with_sizes
from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, DataError, Fault, TooFewRowsError, refuse_together
from tasks.arrivals import Intake, NothingNew, arriving_role, is_night
from tasks.clusters import address_of
from tasks.context import Context, data_access, materialise, open_context
from tasks.parents import base_model
from tasks.plan import recalled, recorded, settled_once
from tasks.preflight import Trained, leaves_process
from tasks.progress import say
from tasks.report.page import show_markdown
from tasks.results import PAIRS, Parent, StageResult
from tasks.showing import DEADLINE_S, only_shows
from tasks.source import source_digest
from tasks.stages import commit_stage, made_before, once_in_a_run, reuse_or_make, stage_key, stage_result
from tasks.task_errors import stage_task

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rlhf_core.data import PromptTemplate
    from rlhf_core.data.preparing import Prepared, TokenMeter
    from rlhf_core.data.reading import ReadSet
    from rlhf_core.models.working_memory import LongestRow

SPLITS = ("sft", "preferences", "ppo", "evaluation")
_DATA = "data"
ROTATION = "rotation.json"
"""Of a dataset whose held-out problems rotate: where the last night's ended, and its dataset."""
UNTIL = "evaluation_until"
"""The figure of a dataset that says where its held-out problems ended, if they rotate."""
REPORT, FACTS, REJECTED = "report.md", "report.json", "rejected.jsonl"
MOST_SAID = 6
"""Findings of the linter that the log tells; the report tells all."""


def with_data(
    config: PipelineConfig, data: str | None, project: Callable[[PipelineConfig], str] = attrgetter("name")
) -> PipelineConfig:
    """Return the configuration with the parameter `data` in it: a set, in place of all sources of the preset.

    The set has the preset's role where the preset has only one and the rows have its form; else their form tells.

    With a reference (`dataset/...`), it is the configuration that the dataset was made with.

    Args:
        config: the preset with the run's parameters.
        data: the parameter.
        project: returns the name of a configuration's project, where earlier nights tell what a folder is for.

    Raises:
        DataError: the set is missing, empty, malformed, or of no known form.
        ReferenceNotFoundError: there is no such dataset.
    """
    if data is None:
        return config
    if is_dataset(data):
        made_with = open_context().store.resolve(data).config["data"]
        return config.model_copy(update={"data": DataConfig.model_validate(made_with)})
    from infra.settings import settings
    from rlhf_core.config import SourceConfig
    from rlhf_core.data.preparing import role_of, with_source

    source = SourceConfig(path=data)
    if config.data.arrivals is not None:
        role = arriving_role(open_context(), config, source, project)
    else:
        role = role_of(source, config.data, data_access(settings()))
    return config.model_copy(update={"data": with_source(config.data, source, role)})


@stage_task(name="prepare-data")
def prepare_data(
    config: PipelineConfig,
    reference: str | None,
    *,
    reads: tuple[str, ...],
    sizes: Sizes | None = None,
    as_of: str | None = None,
) -> StageResult | NothingNew:
    """Return the dataset of a run: the one that is named, or one made from the configuration and stored.

    Where data arrive, and too little has, it is the reason why the night ends.

    Args:
        config: the resolved preset.
        reference: the parameter `data`; a `dataset/...` is returned as it is.
        reads: splits that the run reads; what it could not use is refused before anything is stored.
        sizes: which sizes may follow the data; None keeps all as they are.
        as_of: where data arrive, up to which day; None takes all that has.

    Raises:
        DataError: a set cannot be read, shares prompts with another, is too small, or does not suit the run; or
            sizes that the user set exclude each other or the data.
        ConfigError: the template does not fit the tokenizer.
    """
    context = open_context()
    if is_dataset(reference):
        return stage_result("data", context.store.resolve(str(reference)), reused=True)
    from rlhf_core.data.preparing import set_digests

    before = made_before(context, "data")  # a run goes on with the data that it began with
    if before is not None:
        _tell(context, before)
        return before
    template = _template(context, config)
    intake: Intake | None = None
    sizes = sizes or as_they_are(config)
    if config.data.arrivals is None:
        sets = _read_as_it_began(context, config, template)
    else:
        given = _read_as_it_began(context, _less_what_arrives(config), template)
        intake = Intake(context, config, template, given, as_of, sizes=sizes, reads=reads)
        if (nothing := intake.nothing()) is not None:
            return nothing
        sets = intake.sets
    source = source_digest("data", "arrivals")
    rotation = _rotation(context, config) if is_night(reads) else None
    facts = _facts(config, sizes, template, rotation)
    inputs = [f"{role} {digest}" for role, digest in set_digests(sets).items()]
    inputs += intake.inputs if intake is not None else []

    def key(**further: Any) -> str:
        return stage_key("data", config=facts | further, inputs=inputs, seed=config.seed, source=source)

    def make() -> StageResult:
        started = time.perf_counter()
        after = rotation and rotation[0]
        made = _made(context, config, sizes, sets, template, reads=reads, intake=intake, after=after)
        # this run's splits may have taken rows from others: a run that reads those needs a dataset of its own
        own = key() if made.for_all else key(reads=reads)

        def store() -> StageResult:
            seconds = time.perf_counter() - started
            return _store(context, config, made, intake, rotation, key=own, source=source, seconds=seconds)

        return reuse_or_make(context, stage="data", kind="dataset", name=config.name, key=own, make=store)

    try:
        found = once_in_a_run(
            context,
            "data",
            lambda: reuse_or_make(context, stage="data", kind="dataset", name=config.name, key=key(), make=make),
        )
    except TooFewRowsError as error:
        if intake is None or not intake.learns:
            raise
        return intake.too_few(error)
    _tell(context, found)
    return found


def _facts(
    config: PipelineConfig, sizes: Sizes, template: PromptTemplate, rotation: tuple[str, str] | None
) -> dict[str, Any]:
    """Return what of a run decides its dataset, beside the rows of its sets and its seed."""
    from rlhf_core.data.preparing import SOURCES

    linted = set() if config.data.lint != LintConfig() else {"lint"}  # as it is, it changes no row
    facts = {
        "data": config.data.model_dump(mode="json", exclude={*SOURCES, "splits", *linted}),
        "sizes": sizes.decide_splits(),
        "limits": _limits(config),
        "timeout_s": config.ppo.reward.timeout_s,
        "template": template.digest(),
    }
    if config.data.splits.development:
        facts["development"] = config.data.splits.development, config.data.splits.evaluation
    return facts if rotation is None else facts | {"rotation": rotation}


def _less_what_arrives(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration with no set but that for evaluation, which does not grow."""
    from rlhf_core.data.preparing import ROLES

    return config.model_copy(update={"data": config.data.model_copy(update=dict.fromkeys(ROLES, ()))})


def _rotation(context: Context, config: PipelineConfig) -> tuple[str, str] | None:
    """Return where the last night's held-out problems ended, and which dataset holds them; None if they stay the same.

    A night counts whose policy the gate judged with all its episodes: what failed, or ended at a budget, goes on with
    its own problems. The dataset is part of what names tonight's: when all have been used, the same problems come
    again, but not the same night.
    """
    if not config.data.rotate_evaluation:
        return None

    def find() -> tuple[str, str]:
        reports = [each for each in context.store.list("run", config.name) if not each.metrics.get("unfinished")]
        judged = {parent.uri for report in reports for parent in report.parents}
        datasets = context.store.list("dataset", config.name)
        nights = [each for each in datasets if UNTIL in each.metrics and each.uri in judged]
        return (str(nights[-1].metrics[UNTIL]), nights[-1].uri) if nights else ("", "")

    found: tuple[str, str] = settled_once(context, "held-out problems after", tuple[str, str], find)
    return found


def settled(
    config: PipelineConfig, sizes: Sizes, dataset: StageResult, reference: str | None, *, reads: Collection[str]
) -> PipelineConfig:
    """Return the configuration with the sizes of a dataset's splits and what follows them, and say what that changes.

    Args:
        config: the resolved preset.
        sizes: what the preset and the user want.
        dataset: what `prepare_data` returned.
        reference: the parameter `data`; whoever made the dataset that it names has said how large its splits are.
        reads: splits that the run reads.

    Raises:
        ConfigError: sizes that the user set exclude each other or the dataset, and the run learns by PPO.
    """
    made_with = DataConfig.model_validate(open_context().store.resolve(dataset.uri).config["data"])
    as_made = sizes.with_splits(made_with.splits.model_dump())
    found = settle(as_made, reads=tuple(reads))
    if found is None:
        raise ConfigError(f"{dataset.uri} does not suit this run: {shortage(as_made, (), tuple(reads))}")
    told: list[str] = [] if is_dataset(reference) else [*SIZES_OF_SPLITS]
    if "ppo" in reads:
        refuse_together([Fault(each, found.instead) for each in found.complaints])
        told += BATCHES
    changes = told_changes(sizes.wanted, found.values, told)
    if changes is not None:
        say("data", changes)
    return with_sizes(config.model_copy(update={"data": made_with}), found.values)


class _SetThen(BaseModel):
    """A set as the run found it when it began."""

    digest: str
    """Of all its rows."""
    files: tuple[str, ...]
    """What was read of it: files, objects, or the hub dataset's split."""
    rows: int

    def __str__(self) -> str:
        return f"{counted(self.rows, 'row')} of {enumerate_names(self.files)}"


def _read_as_it_began(context: Context, config: PipelineConfig, template: PromptTemplate) -> dict[str, ReadSet[Any]]:
    """Return the sets that a configuration names, by key.

    Raises:
        DataError: if one cannot be read, or holds something else than when the run began; what it held then was not
            stored yet, and is gone.
    """
    from rlhf_core.data.preparing import read_sets

    told = "and was not stored yet; put back what was there, or start a new run, which takes the data as they are now"
    then: dict[str, _SetThen] | None = recalled(context, _DATA, dict[str, _SetThen])
    try:
        sets = read_sets(config.data, data_access(context.settings), template)
    except DataError as error:
        if then is None or error.passes:
            raise
        held = "; ".join(f"data.{role} was {each}" for role, each in then.items())
        raise DataError(f"{error} ({held} when this run began, {told})") from error
    now = {role: _as_read(each) for role, each in sets.items()}
    then = then or recorded(context, _DATA, dict[str, _SetThen], now)
    for role in {**then, **now}:
        before, found = then.get(role), now.get(role)
        if before is None or found is None or before.digest != found.digest:
            was, is_now = str(before or "not given"), str(found or "not given")
            is_now += " of other content" if is_now == was else ""
            raise DataError(f"data.{role} was {was} when this run began, is {is_now} now, {told}")
    return sets


def _as_read(read: ReadSet[Any]) -> _SetThen:
    files = tuple(file for source in read.sources for file in source.files)
    return _SetThen(digest=read.digest, files=files, rows=sum(source.rows for source in read.sources))


def settle_dataset(context: Context, reference: str | None) -> str | None:
    """Return the parameter `data` with the version of a stored dataset in it, as it was when the run began."""
    if not is_dataset(reference) or parse_reference(str(reference)).version is not None:
        return reference

    def find() -> Parent:
        found = context.store.resolve(str(reference))
        versions = counted(len(context.store.list("dataset", found.name)), "version")
        say("data", f"takes {found.ref.uri}, which {reference} is now, of {versions} (`data` names another)")
        return Parent(uri=found.ref.uri, digest=found.digest)

    found: Parent = settled_once(context, "dataset", Parent, find)
    if not is_dataset(found.uri):
        raise DataError(f"{found.uri}, which this run is said to have begun with, is no dataset; start a new run")
    return found.uri


def is_dataset(reference: str | None) -> bool:
    """Return whether the parameter `data` names a stored dataset."""
    return reference is not None and reference.startswith("dataset/")


_found_fit: set[tuple[str, str, str]] = set()
"""Configuration, dataset, and what of it this process has found fit: the flows of a pipeline ask in turn."""


@stage_task(name="check-data")
def check_data(config: PipelineConfig, dataset: Parent, *, reads: tuple[str, ...]) -> None:
    """Refuse, before any training, a dataset that a later stage could not use.

    Args:
        config: the resolved preset.
        dataset: what `prepare_data` returned.
        reads: splits that the run reads; "preferences" is what a reward model learns from, pairs too.

    Raises:
        DataError: a split is missing or empty, has no answers where they are needed, or exceeds its stage's limit.
        ConfigError: the template does not fit the tokenizer.
    """
    from rlhf_core.data import pairs_from_jsonl, problems_from_jsonl
    from rlhf_core.data.preparing import TokenMeter, refuse_unfit

    context = open_context()
    held = {entry.path for entry in context.store.resolve(dataset.uri).files}
    wanted = {f"{name}.jsonl" for name in reads if not (name == "preferences" and PAIRS in held)}
    if wanted - held:
        raise DataError(
            f"{dataset.uri} holds {', '.join(sorted(held))}, but this run needs {', '.join(sorted(wanted - held))}; "
            "name a dataset of problems, such as the one that the flow `pipeline` stored"
        )
    checked = {(config.model_dump_json(), dataset.digest, name) for name in reads}
    if checked <= _found_fit:
        return
    directory = materialise(context, dataset)
    splits = {
        name: problems_from_jsonl((directory / f"{name}.jsonl").read_bytes())
        for name in (*reads, "development")
        if f"{name}.jsonl" in held
    }
    pairs = None
    if PAIRS in held and "preferences" in reads:
        pairs = pairs_from_jsonl((directory / PAIRS).read_bytes())
    refuse_unfit(splits, pairs, config, TokenMeter(_template(context, config)), reads=reads)
    _found_fit.update(checked)


@stage_task(name="check-memory")
def check_rows_fit(config: PipelineConfig, dataset: Parent, stages: Sequence[Trained]) -> None:
    """Refuse stages for whose longest rows this machine has no memory, by an estimate; warn where it is not sure.

    Args:
        config: as it follows from the data.
        dataset: of the run.
        stages: all that train in the run.

    Raises:
        ModelError: one does not fit, with overrides that make it fit, if any do.
    """
    from rlhf_core.data.preparing import TokenMeter
    from rlhf_core.models.memory import size_of
    from rlhf_core.models.working_memory import check_working_memory

    context, address = open_context(), address_of(config.ppo.cluster)
    size = size_of(config, context.settings.models_dir)
    here = [stage for stage in stages if address is None or not leaves_process(config, stage)]
    checked = {(config.model_dump_json(), dataset.digest, f"memory of {stage}") for stage in here}
    if size is None or size.shape is None or checked <= _found_fit:
        return
    directory, meter = materialise(context, dataset), TokenMeter(_template(context, config))
    for stage in here:
        row = _longest_row(directory, config, stage, meter)
        if row is not None and (warning := check_working_memory(config, stage, size, row)):
            say(stage.replace("_", "-"), warning)
    _found_fit.update(checked)


def _longest_row(directory: Path, config: PipelineConfig, stage: Trained, meter: TokenMeter) -> LongestRow | None:
    """Return the longest row that a stage learns from; None if the dataset has none."""
    from rlhf_core.data import pairs_from_jsonl, problems_from_jsonl
    from rlhf_core.models.working_memory import LongestRow

    name = {"sft": "sft.jsonl", "reward_model": "preferences.jsonl", "ppo": "ppo.jsonl"}[stage]
    if stage == "reward_model" and (directory / PAIRS).is_file():
        pairs = meter.pairs(pairs_from_jsonl((directory / PAIRS).read_bytes()))
        rows = [LongestRow(each.prompt, max(each.chosen, each.rejected)) for each in pairs]
        rows = [each for each in rows if sum(each) <= config.reward_model.max_length]
    elif (directory / name).is_file():
        problems = meter.problems(problems_from_jsonl((directory / name).read_bytes()))
        rows = [LongestRow(each.prompt, (each.response or 0) if stage == "sft" else 0) for each in problems]
    else:
        return None
    return max(rows, key=sum, default=None)


def _template(context: Context, config: PipelineConfig) -> PromptTemplate:
    from rlhf_core.data import PromptTemplate

    base = base_model(context, config)
    return PromptTemplate(_tokenizer(materialise(context, base), base.digest), config.template)


@lru_cache(maxsize=1)
def _tokenizer(directory: Path, digest: str) -> Any:  # noqa: ARG001 - tells models apart that lie there in turn
    """Return a model's tokenizer, which a pipeline's stages ask for ten times."""
    from rlhf_core.models.loading import load_tokenizer

    return load_tokenizer(directory)


def _limits(config: PipelineConfig) -> dict[str, int]:
    from rlhf_core.data.preparing.lengths import PAIRS as PAIRS_SPLIT
    from rlhf_core.data.preparing.lengths import limit_of

    limits = (limit_of(split, config) for split in (*SPLITS, PAIRS_SPLIT))
    return {limit.key: limit.tokens for limit in limits if limit is not None}


def _made(
    context: Context,
    config: PipelineConfig,
    sizes: Sizes,
    sets: dict[str, ReadSet[Any]],
    template: PromptTemplate,
    *,
    reads: tuple[str, ...],
    intake: Intake | None,
    after: str | None,
) -> Prepared:
    from rlhf_core.data.preparing import TokenMeter, prepare, refuse_unfit

    meter, modules = TokenMeter(template), context.settings.reward_modules
    last: Collection[str] = ()
    grows: Collection[str] = ()
    earlier: dict[str, dict[str, list[Any]]] = {}
    if intake is not None:  # one row that is too long must not stop this night and all that follow
        config = config.model_copy(update={"data": config.data.model_copy(update={"too_long": "drop"})})
        last, grows, earlier = intake.tonight.last, intake.arrived.roles, intake.tonight.compared
    made = prepare(
        config,
        sets,
        meter=meter,
        allowed_modules=modules,
        sizes=sizes,
        reads=reads,
        last=last,
        after=after,
        grows=grows,
        earlier=earlier,
    )
    refuse_unfit(made.splits, made.pairs, config, meter, reads=reads, besides=made.faults)
    return made


def _store(
    context: Context,
    config: PipelineConfig,
    made: Prepared,
    intake: Intake | None,
    rotation: tuple[str, str] | None,
    *,
    key: str,
    source: str,
    seconds: float,
) -> StageResult:
    metrics, files = _figures(made), _files(made)
    say("data", _line(made))
    if rotation is not None:
        metrics[UNTIL] = str(made.until)
        # or the store would take tonight for an earlier night with the same problems
        files[ROTATION] = json.dumps(dict(zip(("after", "since"), rotation, strict=True))).encode()
        if made.heldout < 2 * metrics["problems_evaluation"]:
            say("data", _small_pool(made))
    for each in made.report.sets:
        if each.not_shown:
            say("data", f"left out of the messages of {each.role}: {', '.join(map(str, each.not_shown))}")
    if intake is not None:
        arrived, figures = intake.files(made)
        intake.say(figures)
        files |= arrived | {REPORT: bytes(files[REPORT]) + intake.report(figures).encode("utf-8", "replace")}
        metrics |= figures
    data = config.data.model_copy(update={"splits": made.sizes})
    return commit_stage(
        context,
        stage="data",
        kind="dataset",
        name=config.name,
        files=files,
        key=key,
        parents=[],
        config=config.model_copy(update={"data": data}),
        metrics=metrics | {"seconds": seconds},
        source=source,
    )


def _files(made: Prepared) -> dict[str, Path | bytes]:
    from rlhf_core.data import pairs_to_jsonl, problems_to_jsonl
    from rlhf_core.data.jsonl import to_jsonl
    from rlhf_core.data.preparing import report_to_markdown

    files: dict[str, Path | bytes] = {f"{name}.jsonl": problems_to_jsonl(each) for name, each in made.splits.items()}
    if made.pairs is not None:
        files[PAIRS] = pairs_to_jsonl(made.pairs)
    files[REJECTED] = to_jsonl(made.report.rejected_rows)
    files[FACTS] = json.dumps(made.report.as_dict(), indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")
    files[REPORT] = report_to_markdown(made.report).encode("utf-8", "replace")
    return files


def _small_pool(made: Prepared) -> str:
    return (
        f"the held-out pool has {counted(made.heldout, 'problem')}, and a night asks "
        f"{len(made.splits['evaluation'])} of them: some come again the next night; give more data, raise "
        "data.heldout_fraction, or lower data.splits.evaluation"
    )


def _figures(made: Prepared) -> dict[str, Any]:
    counts: dict[str, Any] = {f"problems_{name}": len(problems) for name, problems in made.splits.items()}
    if made.pairs is not None:
        counts["pairs"] = len(made.pairs)
    sets = made.report.sets
    return counts | {
        "rejected": sum(each.rejected for each in sets),
        "duplicates": sum(each.duplicates for each in sets),
        "too_long": sum(each.longer for each in made.report.too_long if each.dropped),
    }


def _line(made: Prepared) -> str:
    """Return the line on the data for people who follow the run."""
    figures = _figures(made)
    counts = [f"{figures[f'problems_{name}']} {name}" for name in made.splits if figures[f"problems_{name}"]]
    if made.pairs is not None:
        counts.append(counted(len(made.pairs), "pair"))
    left_out = [
        f"{figures[name]} {words}"
        for name, words in (("rejected", "rejected"), ("duplicates", "duplicates"), ("too_long", "too long"))
        if figures[name]
    ]
    check = made.report.verifier_check
    parts = [", ".join(counts), f"left out {', '.join(left_out)}" if left_out else "", "no prompt in two splits"]
    if check is not None:
        parts.append(str(check))
    return "; ".join(part for part in parts if part)


def _tell(context: Context, dataset: StageResult) -> None:
    """Tell what is to be known of a dataset, whether it was made tonight or before."""
    _say_findings(context, dataset)
    _show(context, dataset)


@only_shows("the linter's findings in the log", deadline_s=DEADLINE_S)
def _say_findings(context: Context, dataset: StageResult) -> None:
    facts = json.loads(context.store.read_bytes(context.store.resolve(dataset.uri), FACTS))
    found = facts.get("lint", [])  # earlier versions had no linter
    for each in found[:MOST_SAID]:
        say("data", f"lint {each['rule']}: {each['sentence']}")
    if len(found) > MOST_SAID:
        say("data", f"lint: {counted(len(found) - MOST_SAID, 'more finding')} in the report of {dataset.uri}")


@only_shows("the page of the data in Prefect", deadline_s=DEADLINE_S)
def _show(context: Context, dataset: StageResult) -> None:
    """Put the report of the data on the run's page."""
    text = context.store.read_bytes(context.store.resolve(dataset.uri), REPORT).decode("utf-8", "replace")
    show_markdown("data", dataset.uri, text, seen_at_once=f"Report of {dataset.uri}")
