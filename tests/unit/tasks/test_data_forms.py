"""Data as teams have them become a run's dataset: CSV, mixtures, composites, competitions, verifiers of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.presets import resolve
from infra.artifacts import open_default_store
from rlhf_core.config import PipelineConfig
from rlhf_core.data import Problem, problems_from_jsonl
from rlhf_core.errors import ConfigError, DataError
from tasks.data import SPLITS, prepare_data, with_data
from tasks.preflight import preflight
from tests.unit.data.read_sets import CHATML, SIZES
from tests.unit.tasks import data_files
from tests.unit.tasks.data_files import write

SMALL = data_files.SMALL | {
    "ppo.max_prompt_tokens": 400,
    "sft.max_length": 800,
    "evaluation.max_new_tokens": 400,
}
FILES_ALONE: dict[str, Any] = {"data.task": None, "data.task_parameters": {}, "data.demonstrations": []}
EVEN = "tests.unit.tasks.even:letters"


@pytest.fixture
def preset(model: Path) -> Callable[..., PipelineConfig]:
    return lambda name="quickstart", **changes: resolve(name, model=str(model), overrides=SMALL | changes)


def made_of(config: PipelineConfig, reads: tuple[str, ...] = SPLITS) -> tuple[dict[str, list[Problem]], dict[str, Any]]:
    """Return the splits of the dataset and its report."""
    made = prepare_data.fn(config, None, reads=reads)  # type: ignore[attr-defined]
    store = open_default_store()
    manifest = store.resolve(made.uri)
    splits = {name: problems_from_jsonl(store.read_bytes(manifest, f"{name}.jsonl")) for name in SPLITS}
    return splits, store.read_json(manifest, "report.json")


def test_a_csv_with_a_prompt_column_is_what_ppo_samples_from(
    preset: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("id,prompt\n" + "".join(f'{n},"Tell me, please, of {n}."\n' for n in range(40)))
    judged = {"ppo.reward": {"verifier": 0.0, "reward_model": 1.0}, "evaluation.judge": "reward_model"}
    splits, report = made_of(with_data(preset(**judged), str(path)), ("ppo", "evaluation"))
    drawn = {problem.prompt for name in ("ppo", "evaluation") for problem in splits[name]}
    assert len(drawn) == SIZES["ppo"] + SIZES["evaluation"]
    assert drawn < {f"Tell me, please, of {n}." for n in range(40)}
    assert [source["form"] for source in report["sets"][0]["sources"]] == ["CSV: prompts"]


def test_a_mixture_has_its_weights_and_each_source_its_own_columns(
    preset: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    ours = write(tmp_path / "ours.jsonl", [{"question": f"{n} + 0?", "answer": str(n)} for n in range(30)])
    theirs = tmp_path / "theirs.csv"
    theirs.write_text("aufgabe,loesung\n" + "".join(f"{n} + 100?,{n + 100}\n" for n in range(30)))
    sources = [
        {"path": ours, "weight": 3},
        {"path": str(theirs), "weight": 1, "columns": {"question": "aufgabe", "answer": "loesung"}},
    ]
    splits, report = made_of(preset(**FILES_ALONE, **{"data.problems": sources}))
    told = [(each["weight"], each["kept"]) for each in report["sets"][0]["sources"]]
    assert told[0] == (3, 30)
    assert told[1][0] == 1
    assert told[1][1] in {9, 10, 11}  # a third of the others, to within a row
    for problem in (each for rows in splits.values() for each in rows):
        first, second = problem.prompt.removesuffix("?").split(" + ")
        assert problem.answer == str(int(first) + int(second))


@pytest.mark.integration
def test_a_composites_problems_are_drawn_and_its_scorers_asked(preset: Callable[..., PipelineConfig]) -> None:
    parts = [
        {"name": "spell_backward", "weight": 3, "config": {"max_word_len": 5}},
        {"name": "gcd", "weight": 1, "config": {"max_numbers": 2}},
    ]
    given = {"data.task": "composite", "data.task_parameters": {"datasets": parts}, "data.demonstrations": []}
    splits, report = made_of(preset(**given))
    assert {name: len(rows) for name, rows in splits.items()} == SIZES
    assert (report["verifier"]["verifier"], report["verifier"]["share"]) == ("reasoning_gym:composite", 1.0)


def test_competition_mathematics_is_learnt_in_tags_that_its_verifier_accepts(
    preset: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    rows = [
        {"problem": f"What is {n} over 7?", "solution": f"It is $\\boxed{{\\frac{{{n}}}{{7}}}}$."}
        for n in range(10, 50)
    ]
    mathematics = {"data.verifier": "math_competition_reward_fn", "ppo.max_new_tokens": 400}
    tags = resolve("gsm8k").template.model_dump(mode="json")["tags"]
    config = preset("gsm8k", **mathematics, **{"template": {"prompt": CHATML, "tags": tags}})
    splits, report = made_of(with_data(config, write(tmp_path / "train.jsonl", rows)))
    problem = splits["sft"][0]
    number = problem.prompt.split()[2]
    assert problem.answer == f"\\frac{{{number}}}{{7}}"
    assert problem.demonstration == (
        f"<think>It is $\\boxed{{\\frac{{{number}}}{{7}}}}$.</think><answer>\\frac{{{number}}}{{7}}</answer>"
    )
    assert report["verifier"]["verifier"] == "math_competition_reward_fn"
    assert report["verifier"]["share"] == 1.0


def test_held_out_answers_need_no_thought_for_a_verifier_that_wants_one(
    preset: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    """GSM8K as the preset takes it: worked solutions to learn, problems with answers to be judged by."""

    def school(first: int, count: int) -> list[dict[str, Any]]:
        return [
            {"question": f"{n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(first, first + count)
        ]

    files = {
        "data.demonstrations": write(tmp_path / "train.jsonl", school(0, 80)),
        "data.evaluation": write(tmp_path / "test.jsonl", school(100, 20)),
    }
    config = resolve("gsm8k", overrides=files)
    small = preset("gsm8k", **files, **{"template": config.template.model_dump(mode="json") | {"prompt": CHATML}})
    splits, report = made_of(small)
    assert splits["evaluation"][0].demonstration is None
    assert (report["verifier"]["verifier"], report["verifier"]["share"]) == ("gsm8k_reward_fn", 1.0)


def test_a_verifier_of_ones_own_passes_the_preflight_and_is_asked_about_the_data(
    preset: Callable[..., PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(first: int) -> PipelineConfig:  # <answer>100</answer> has twenty letters, <answer>10</answer> nineteen
        rows = [{"question": f"{n} + 0?", "answer": str(n)} for n in range(first, first + 40)]
        return with_data(preset(**{"data.verifier": EVEN}), write(tmp_path / f"{first}.jsonl", rows))

    with pytest.raises(ConfigError, match=r"not allowed to run here; add tests\.unit\.tasks\.even to RLHF_REWARD_MOD"):
        preflight.fn(of(100), trains="sft")  # type: ignore[attr-defined]
    monkeypatch.setenv("RLHF_REWARD_MODULES", "tests.unit.tasks.even")
    preflight.fn(of(100), trains="sft")  # type: ignore[attr-defined]
    report = made_of(of(100))[1]
    assert (report["verifier"]["verifier"], report["verifier"]["share"]) == (EVEN, 1.0)
    with pytest.raises(DataError, match=f"the data and the verifier disagree: {EVEN} accepts none of 6 demonstrations"):
        made_of(of(10))
