"""The quickstart's rows as token ids; GSM8K's and HH-RLHF's, where RLHF_DATA_DIR says that they are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from bench.speed.measure import NotHereError, Run
from bench.speed.models import directory
from flows.presets import resolve
from infra.settings import settings
from rlhf_core.config import TemplateConfig
from rlhf_core.config.data import SourceConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.data.encoding import EncodedPair, encode_demonstrations, encode_pairs
from rlhf_core.data.gym import draw_problems
from rlhf_core.data.reading import Access, Role, read_set
from rlhf_core.models.loading import load_tokenizer
from rlhf_core.supervised.batches import MaskedTokens

ROWS = 512
"""Of a set, the first ones: enough for steady shares."""


@cache
def quickstart(run: Run, count: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts of the quickstart, which its template begins alike, and right responses."""
    config = resolve("quickstart")
    template = PromptTemplate(load_tokenizer(directory(run)), config.template)
    problems = draw_problems(str(config.data.task), config.data.task_parameters, seed=0, count=count)
    answers = [template.answer_text(str(each.answer)) for each in problems]
    return [
        (template.prompt_ids(each.prompt), template.response_ids(answer))
        for each, answer in zip(problems, answers, strict=True)
    ]


@cache
def gsm8k(run: Run) -> list[MaskedTokens]:
    """Return worked solutions as demonstrations."""
    found = encode_demonstrations(_read(run, "gsm8k/train.jsonl", "demonstrations"), _template(run))
    return [MaskedTokens(*each) for each in found]


@cache
def hh_pairs(run: Run) -> list[EncodedPair]:
    """Return pairs of answers of which people preferred one, within what a reward model is trained on."""
    found = encode_pairs(_read(run, "hh-rlhf/harmless-base-test.jsonl.gz", "preferences"), _template(run))
    return [pair for pair in found if pair.longest <= longest(run)]


def hh(run: Run) -> list[MaskedTokens]:
    """Return the preferred answers as demonstrations."""
    return [
        MaskedTokens([*pair.chosen], [place >= (pair.prompt_tokens or 0) for place in range(len(pair.chosen))])
        for pair in hh_pairs(run)
    ]


def longest(run: Run) -> int:
    """Return the most tokens of a row that is taken: a tiny model's tokens are bytes."""
    return 1024 if run.tiny else 512


def _template(run: Run) -> PromptTemplate:
    return PromptTemplate(load_tokenizer(directory(run)), TemplateConfig())


def _read(run: Run, name: str, role: Role) -> list[Any]:
    place = settings().data_dir
    file = None if place is None else place / name
    if file is None or not file.is_file():
        raise NotHereError(f"RLHF_DATA_DIR names no directory with {name} in it")
    limit = 32 if run.tiny else ROWS
    found = read_set([SourceConfig(path=str(file), limit=limit)], role, access=Access(Path("unused")), bad_rows="drop")
    return list(found.rows)
