"""prefect.yaml is as it must be, and what is not as it must be is refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.errors import ServiceError
from infra.services import prefect_yaml
from infra.services.prefect_yaml import DeploymentEntry, read_prefect_yaml
from infra.settings import CHECKOUT
from infra.strict_yaml import load_yaml

FLOW = '@flow(name="night-shift")\ndef shift(preset: str = "small", episodes: int = 1): ...\ndef helper(): ...\n'


def entry(**changes: Any) -> dict[str, Any]:
    good = {
        "name": "nightly",
        "entrypoint": "flows/shift.py:shift",
        "description": "The night shift.",
        "parameters": {"preset": "small"},
        "enforce_parameter_schema": True,
        "work_pool": {"name": "rlhf"},
        "schedules": [{"slug": "nightly", "cron": "0 2 * * *", "timezone": "Europe/Berlin", "active": False}],
    }
    return {**good, **changes}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "flows" / "presets").mkdir(parents=True)
    (tmp_path / "flows" / "presets" / "small.yaml").write_text("name: small\n")
    (tmp_path / "flows" / "shift.py").write_text(FLOW)
    return tmp_path


def read(checkout: Path, *entries: dict[str, Any], **top: Any) -> dict[str, DeploymentEntry]:
    (checkout / "prefect.yaml").write_text(yaml.safe_dump({"deployments": list(entries), **top}))
    return read_prefect_yaml(checkout)


def test_the_deployments_of_this_checkout_are_the_promised_ones() -> None:
    presets = {file.stem for file in (CHECKOUT / "flows" / "presets").glob("*.yaml")}
    stages = ("pipeline", "sft", "reward-model", "ppo", "evaluate")
    every = {f"{stage}/{preset}" for stage in stages for preset in presets}
    found = read_prefect_yaml(CHECKOUT)
    assert set(found) == every - {"sft/qwen-gsm8k"} | {"pipeline/nightly"}
    assert all(found[name].parameters["preset"] == name.partition("/")[2] for name in every & set(found))
    assert found["ppo/qwen-gsm8k"].parameters == {"preset": "qwen-gsm8k", "actor": "model/base"}
    assert found["evaluate/qwen-gsm8k"].parameters == {"preset": "qwen-gsm8k"}


STAGES = {
    "local": {"work_pool": {"name": "rlhf"}, "enforce_parameter_schema": True},
    "stages": {"flows/shift.py:shift": "The shift"},
}


def test_a_preset_without_a_block_is_a_deployment_and_a_block_wins(checkout: Path) -> None:
    (checkout / "flows" / "presets" / "mine.yaml").write_text("name: mine\n")
    found = read(checkout, entry(name="small"), definitions=STAGES)
    assert [found[f"night-shift/{name}"].description for name in ("small", "mine")] == [
        "The night shift.",
        "The shift with the preset mine (docs/presets.md).",
    ]
    assert found["night-shift/mine"].parameters == {"preset": "mine"}
    assert found["night-shift/mine"].tags == ("resumes", "mine")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"local": {}}, r"night-shift/small is made from definitions\.local, whose enforce_parameter_schema is not as"),
        ({"stages": {"flows/shift.py:gone": "x"}}, r"definitions\.stages: flows/shift\.py has no function 'gone'"),
    ],
)
def test_a_mistake_in_what_stages_are_made_from_is_refused(
    checkout: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ServiceError, match=sentence):
        read(checkout, entry(), definitions=STAGES | changes)


def test_every_schedule_of_this_checkout_is_inactive_until_a_data_source_is_set() -> None:
    schedules = [each for entry in read_prefect_yaml(CHECKOUT).values() for each in entry.schedules]
    assert schedules
    assert not any(schedule.active for schedule in schedules)


def test_the_committed_file_holds_no_place_of_one_machine() -> None:
    assert "pull" not in yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())
    assert str(CHECKOUT) not in (CHECKOUT / "prefect.yaml").read_text()


def test_every_key_that_we_allow_is_one_that_prefect_reads() -> None:
    from prefect.cli.deploy._models import DeploymentConfig, RawScheduleConfig, WorkPoolConfig

    for ours, theirs in (
        (DeploymentEntry, DeploymentConfig),
        (prefect_yaml.WorkPoolEntry, WorkPoolConfig),
        (prefect_yaml.ScheduleEntry, RawScheduleConfig),
    ):
        assert set(ours.model_fields) <= set(theirs.model_fields)


def test_a_good_file_is_read_under_its_flows_own_names(checkout: Path) -> None:
    assert set(read(checkout, entry())) == {"night-shift/nightly"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shedules": []}, r"deployments\.0\.shedules: Extra inputs are not permitted"),
        ({"work_pool": {"name": "rlhf", "queue": "a"}}, r"work_pool\.queue: Extra inputs"),
        ({"enforce_parameter_schema": False}, r"enforce_parameter_schema: Input should be True"),
        ({"entrypoint": "flows/gone.py:shift"}, r"flows/gone\.py cannot be read"),
        ({"entrypoint": "flows/shift.py:gone"}, r"has no function 'gone'; it has shift, helper"),
        ({"entrypoint": "flows/shift.py:helper"}, r"helper is no flow"),
        ({"parameters": {"preset": "smal"}}, r"there is no preset 'smal'; did you mean small\?"),
        ({"parameters": {"epsiodes": 2}}, r"parameter 'epsiodes' is none of preset, episodes"),
        (
            {"concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"}},
            r"deployments\.0\.concurrency_limit: Prefect keeps this limit in its server's memory, and a run that "
            r"cannot renew it while the server is away is crashed; give the deployment the tag `one-at-a-time` instead",
        ),
        ({"concurrency_limit": 2}, r"concurrency_limit: Prefect keeps this limit"),
        ({"name": "Night Shift"}, r"deployments\.0\.name: String should match"),
    ],
)
def test_a_mistake_in_a_deployment_is_refused_with_its_place(
    checkout: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ServiceError, match=sentence):
        read(checkout, entry(**changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cron": "0 25 * * *"}, r"schedule nightly of night-shift/nightly: .*[Ii]nvalid cron"),
        ({"timezone": "Europe/Berln"}, r"schedule nightly of night-shift/nightly: .*timezone"),
        ({"actve": True}, r"schedules\.0\.actve: Extra inputs"),
    ],
)
def test_a_mistake_in_a_schedule_is_refused_with_its_place(
    checkout: Path, changes: dict[str, Any], sentence: str
) -> None:
    good = {"slug": "nightly", "cron": "0 2 * * *", "timezone": "Europe/Berlin", "active": False}
    with pytest.raises(ServiceError, match=sentence):
        read(checkout, entry(schedules=[{**good, **changes}]))


def test_two_deployments_of_one_name_are_refused(checkout: Path) -> None:
    with pytest.raises(ServiceError, match="there are two deployments night-shift/nightly"):
        read(checkout, entry(), entry())


def test_an_unknown_key_at_the_top_is_refused(checkout: Path) -> None:
    with pytest.raises(ServiceError, match=r"pul: Extra inputs"):
        read(checkout, entry(), pul=[])


def test_a_file_that_is_no_yaml_is_refused_with_the_line(checkout: Path) -> None:
    (checkout / "prefect.yaml").write_text("deployments: [\n")
    with pytest.raises(ServiceError, match=r"is not YAML: .*line 2"):
        read_prefect_yaml(checkout)


def test_a_key_that_stands_twice_is_refused_with_its_line(checkout: Path) -> None:
    """Prefect's own loader keeps the second: tags were lost so."""
    read(checkout, entry())
    lines = (checkout / "prefect.yaml").read_text().splitlines()
    place = lines.index("  name: nightly")
    (checkout / "prefect.yaml").write_text("\n".join([*lines[: place + 1], "  name: daily", *lines[place + 1 :]]))
    with pytest.raises(
        ServiceError,
        match=rf"prefect\.yaml, line {place + 2}: the key 'name' stands here and in line {place + 1}; keep",
    ):
        read_prefect_yaml(checkout)


def test_the_nights_runs_are_tagged_as_the_nights() -> None:
    assert read_prefect_yaml(CHECKOUT)["pipeline/nightly"].tags == (
        *("resumes", "one-at-a-time", "needs-data", "starts-within-6h", "nightly"),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "a: 1\nb:\n  - {c: 1, d: {e: 1, 'e': 2}}\n",
            "line 3: the key 'e' stands here and in line 3; keep one",
        ),
        ("a: 1\n\nb: 2\na: 3\n", "line 4: the key 'a' stands here and in line 1; keep one of them"),
        ("a: !python/name:os.system 1\n", "line 1: could not determine a constructor for the tag"),
        ("a: {b: 1}\n---\nb: 1\n", "is not YAML: line 2: but found another document"),
        (b"a: \xff\n", "is not YAML: unacceptable character"),
    ],
)
def test_a_file_that_says_no_one_thing_is_refused(tmp_path: Path, text: str | bytes, sentence: str) -> None:
    (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'a.yaml'}.*{sentence}") as caught:
        load_yaml(tmp_path / "a.yaml")
    assert "\n" not in str(caught.value)


def test_a_merged_key_may_be_said_again_by_the_mapping_that_merges_it(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: [*b, *a], z: 4}\nd: {<<: *a, <<: *b, y: 5}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert load_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)
    assert load_yaml(tmp_path / "a.yaml")["c"] == {"x": 3, "y": 2, "z": 4}


def test_a_preset_whose_name_no_deployment_may_have_is_refused(checkout: Path) -> None:
    (checkout / "flows" / "presets" / "My_own.yaml").write_text("name: mine\n")
    with pytest.raises(ServiceError, match=r"My_own\.yaml: a preset is named by lower-case letters.*rename the file"):
        read(checkout, entry())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-2E+3", -2000.0),
        ("1.5e3", 1500.0),
        (".5e1", 5.0),
        ("e5", "e5"),
        ("1e", "1e"),
        ("'1e5'", "1e5"),
    ],
)
def test_a_number_with_an_exponent_is_a_number(tmp_path: Path, text: str, value: object) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"key: {text}\n")
    assert load_yaml(path) == {"key": value}
