"""Parameters of `rlhf run`: what is typed wrongly is told before there is a run, and paths are those of who types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from flows.cli.parameters import check_configuration, check_parameters, placed, read_parameters
from flows.pipeline import pipeline
from rlhf_core.errors import ConfigError, DataError, ModelError, RlhfError

SCHEMA = parameter_schema(pipeline).model_dump(by_alias=True)
"""As Prefect's server has it."""


def judged(*pairs: str) -> dict[str, Any]:
    parameters = read_parameters(pairs)
    check_parameters("pipeline/quickstart", parameters, SCHEMA, configured=True)
    check_configuration({"preset": "quickstart", **parameters})
    return parameters


def test_values_are_json_or_else_text() -> None:
    given = judged("episodes=3", "model=null", "data=mine.jsonl", """overrides={"ppo.lr": 1e-5, "seed": 4}""")
    assert given == {"episodes": 3, "model": None, "data": "mine.jsonl", "overrides": {"ppo.lr": 1e-5, "seed": 4}}


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        ("episodes=two", 'pipeline/quickstart: episodes must be a whole number or null, but it is "two"'),
        ("episodes=1.5", "episodes must be a whole number or null, but it is 1.5"),
        ("seed=true", "seed must be a whole number or null, but it is true"),
        ("seed=-1", "seed: input should be greater than or equal to 0, but it is -1"),
        ("data=7", "data must be text or null, but it is 7"),
        ("preset=null", "preset must be text, but it is null"),
        ("name=My Project", "name must be 1 to 63 lower-case letters, digits and dashes, .* but it is 'My Project'"),
        ("preset=quikstart", "there is no preset 'quikstart'; did you mean quickstart"),
        (
            "overrides=nonsense",
            """overrides must be a mapping such as '{"ppo.lr": 1e-5}' or null, but it is "nonsense\"""",
        ),
        ("overrides=[1, 2]", "overrides must be a mapping such as .* or null, but it is [1, 2]"),
        ("overrides={ppo.lr: 1}", 'but it is "{ppo.lr: 1}", which is not JSON: Expecting property name'),
        ("overrides={1: 2}", "which is not JSON: Expecting property name enclosed in double quotes"),
        ('overrides={"ppo.lr": 1e-5, "ppo.lr": 1e-4}', "overrides: the key 'ppo.lr' stands twice; keep one of them"),
        ('overrides={"ppo.lora": {"r": 1, "r": 2}}', "overrides: the key 'r' stands twice; keep one of them"),
        ('overrides={"ppo.lr": NaN}', "overrides: NaN is no number that JSON has"),
        ('overrides={"ppo.lr": 1e999}', "overrides: 1e999 is no number that JSON has"),
        ('overrides={"ppo.learning_rate": 1}', "no configuration key 'ppo.learning_rate'; did you mean ppo.lr?"),
        ("episodes=" + "1" * 5000, "episodes must be a whole number or null, but it is"),
        ("epsiodes=3", "no parameter 'epsiodes' (did you mean episodes?); its parameters are preset, model, actor"),
        ("num_episodes=3", "no parameter 'num_episodes' (did you mean episodes?)"),
        ("model_name_or_path=x", "no parameter 'model_name_or_path' (did you mean model?)"),
        ("dataset=x", "no parameter 'dataset' (did you mean data?)"),
        ("modle=x", "no parameter 'modle' (did you mean model?)"),
        (
            "learning_rate=1e-05",
            """'learning_rate' (did you mean -p overrides='{"sft.lr": 1e-05}', or reward_model.lr, or ppo.lr?)""",
        ),
        ("ppo.lr=1", """'ppo.lr' (did you mean -p overrides='{"ppo.lr": 1}'?)"""),
        ("zzz=1", "no parameter 'zzz'; its parameters are preset, "),
        ("zzz", "a parameter is written NAME=VALUE, but 'zzz' came"),
    ],
)
def test_a_parameter_that_is_wrong_is_told_in_one_sentence(pair: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judged(pair)
    told = str(caught.value)
    assert all(part in told for part in sentence.split(" .* "))
    assert "\n" not in told
    assert len(told) < 500


def test_a_parameter_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the parameter overrides is given twice; give it once"):
        read_parameters(['overrides={"ppo.lr": 1e-5}', 'overrides={"seed": 1}'])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    for name in ("mine.jsonl", "parts/a.jsonl", "owner/set/train.jsonl", "llama/config.json", "dataset/d.jsonl"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("{}\n")
    (tmp_path / "above.jsonl").write_text("{}\n")
    (work / "smollm2-135m-instruct").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(work))
    return work


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("mine.jsonl", "{work}/mine.jsonl"),
        ("./mine.jsonl", "{work}/mine.jsonl"),
        ("~/mine.jsonl", "{work}/mine.jsonl"),
        ("../above.jsonl", "{work}/../above.jsonl"),
        ("parts", "{work}/parts"),
        ("owner/set", "{work}/owner/set"),  # what exists here is meant, as where it is read
        ("dataset/d.jsonl", "{work}/dataset/d.jsonl"),
        ("dataset/quickstart@3", "dataset/quickstart@3"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("s3://bucket/train.jsonl", "s3://bucket/train.jsonl"),
    ],
)
def test_a_path_of_data_is_the_callers(folder: Path, given: str, meant: str, *, here: bool) -> None:
    wanted = meant.format(work=folder)
    assert placed({"data": given, "seed": 1}, here=here) == {"data": wanted, "seed": 1}
    if not given.startswith("dataset/quickstart"):
        sources = [given, {"path": given, "limit": 3}]
        overrides = {"data.problems": sources, "data.evaluation.path": given, "data": {"prompts": given, "task": None}}
        assert placed({"overrides": overrides}, here=here)["overrides"] == {
            "data.problems": [wanted, {"path": wanted, "limit": 3}],
            "data.evaluation.path": wanted,
            "data": {"prompts": wanted, "task": None},
        }


def test_a_pattern_is_the_callers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed({"data": "parts/*.jsonl"}, here=True) == {"data": f"{folder}/parts/*.jsonl"}
    assert placed({"data": "gone/*.jsonl"}, here=False) == {"data": "gone/*.jsonl"}
    (folder / "[x]").mkdir()
    (folder / "[x]" / "b.jsonl").write_text("{}\n")
    monkeypatch.chdir(folder / "[x]")
    assert placed({"data": "*.jsonl"}, here=True) == {"data": f"{folder}/[[]x]/*.jsonl"}


@pytest.mark.parametrize(
    ("parameters", "error", "sentence"),
    [
        (
            {"data": "mime.jsonl"},
            DataError,
            "data file {work}/mime.jsonl does not exist; did you mean {work}/mine.jsonl?",
        ),
        ({"data": "no/x.csv.gz"}, DataError, "data file {work}/no/x.csv.gz does not exist, nor does its directory"),
        ({"data": "./owner/other"}, DataError, "data file {work}/owner/other does not exist"),
        ({"data": "/no/where.jsonl"}, DataError, "data file /no/where.jsonl does not exist, nor does its directory"),
        ({"data": "parts/*.csv"}, DataError, "no file matches {work}/parts/*.csv; {work}/parts holds a.jsonl"),
        ({"data": "x" * 300 + ".jsonl"}, DataError, "xxx.jsonl cannot be read: File name too long"),
        ({"overrides": {"data.evaluation": ["t.jsonl"]}}, DataError, "data file {work}/t.jsonl does not exist"),
        ({"model": "./lama"}, ModelError, "model './lama' does not exist: there is no directory {work}/lama"),
        ({"overrides": {"model.path": "/no/llama"}}, ModelError, "there is no directory /no/llama"),
    ],
)
def test_what_can_only_be_here_and_is_not_is_refused_with_its_folder(
    folder: Path, parameters: dict[str, Any], error: type[RlhfError], sentence: str
) -> None:
    with pytest.raises(error) as caught:
        placed(parameters, here=True)
    assert sentence.format(work=folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_on_another_machine_what_is_not_here_may_be_there() -> None:
    for parameters in ({"data": "train.jsonl"}, {"data": "/data/train.jsonl"}, {"model": "/models/llama"}):
        assert placed(parameters, here=False) == parameters


def test_a_model_is_the_callers_where_it_is_a_directory(folder: Path) -> None:
    for given, meant in (
        ("llama", f"{folder}/llama"),
        ("./llama", f"{folder}/llama"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),  # a packaged name is the package's everywhere
        ("./smollm2-135m-instruct", f"{folder}/smollm2-135m-instruct"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        (None, None),
    ):
        assert placed({"model": given}, here=True) == {"model": meant}
        overrides = {"model.path": given, "model": {"path": given}}
        assert placed({"overrides": overrides}, here=True)["overrides"] == {
            "model.path": meant,
            "model": {"path": meant},
        }


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"preset": "quikstart"}, "preset is not as it must be: 'quikstart' is not one of"),
        ({"episodes": 0}, "episodes is not as it must be: 0 is less than the minimum of 1"),
        ({"overrides": {"ppo": {"lr": -1}}}, "overrides.ppo.lr is not as it must be: -1 is less"),
        ({"overrides": {"ppo.rate": 1}}, "overrides.ppo.rate is not as it must be: 1 .* no configuration key"),
    ],
)
def test_what_a_run_on_another_machine_would_refuse_is_refused_by_its_schema(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_parameters("pipeline/quickstart", wrong, SCHEMA)
