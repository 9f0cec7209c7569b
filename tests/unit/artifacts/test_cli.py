"""`rlhf artifacts`, on a store in a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.cli.artifacts import app, print_list
from infra.artifacts import ArtifactStore, open_default_store
from infra.errors import ReferenceNotFoundError, StoreError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """A store, named by the settings, with a short chain: data, SFT, two policies."""
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_STORE_URL", (tmp_path / "store").as_uri())
    store = open_default_store()
    data = store.commit("dataset", "sorting", {"rows.jsonl": b"{}\n"})
    sft = store.commit("sft", "quickstart", {"w": b"1"}, parents=[data, "model/smollm2"])
    for step in range(2):
        metrics = {"reward": 0.25 * step}
        store.commit("policy", "quickstart", {"w": b"%d" % step, "c/d": b"{}"}, parents=[sft, data], metrics=metrics)
    store.set_alias("policy/quickstart@1", "champion", why="first", who="test")
    return store


@pytest.fixture
def rlhf_artifacts(store: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line and return what it printed."""
    del store

    def run(*words: str | Path) -> str:
        app([str(word) for word in words], result_action="return_value", exit_on_error=False)
        return capsys.readouterr().out

    return run


def test_list_shows_each_version_with_its_aliases(rlhf_artifacts: Any) -> None:
    rows = json.loads(rlhf_artifacts("list", "--json"))
    assert [(row["uri"], row["aliases"]) for row in rows] == [
        ("dataset/sorting@1", []),
        ("sft/quickstart@1", []),
        ("policy/quickstart@1", ["champion"]),
        ("policy/quickstart@2", []),
    ]
    assert (rows[3]["size"], rows[3]["files"], rows[3]["metrics"]) == (3, 2, {"reward": 0.25})
    assert [row["version"] for row in json.loads(rlhf_artifacts("list", "policy/quickstart", "--json"))] == [1, 2]
    assert "policy/quickstart@1  champion  " in rlhf_artifacts("list", "policy")
    assert "holds no artifact of evaluation" in rlhf_artifacts("list", "evaluation")


@pytest.mark.parametrize(("width", "titles"), [(78, 6), (77, 5), (63, 4), (56, 3), (20, 2)])
def test_a_list_in_a_narrow_terminal_has_fewer_columns_and_whole_references(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str], width: int, titles: int
) -> None:
    rows = [("champion", manifest) for manifest in store.list("policy")]
    screen = Console(width=width, force_terminal=True, color_system=None)
    print_list(screen, rows)
    header, *lines = capsys.readouterr().out.splitlines()
    assert len(header.split()) == titles
    assert [line.split()[0] for line in lines] == ["policy/quickstart@1", "policy/quickstart@2"]
    assert titles == 2 or max(map(len, [header, *lines])) <= width


@pytest.mark.parametrize(
    ("what", "nearest"),
    [
        ("policy/quickstrt", "did you mean policy/quickstart"),
        ("evaluation/quickstart", "did you mean .*policy/quickstart"),
        ("polcy", r"did you mean policy\?\); the kinds are"),
        ("polcy/quickstart", r"did you mean policy\?\); the kinds are"),
    ],
)
def test_list_of_a_name_or_kind_that_is_unknown_offers_the_nearest(
    rlhf_artifacts: Any, what: str, nearest: str
) -> None:
    for more in ((), ("--json",)):
        with pytest.raises(ReferenceNotFoundError, match=nearest):
            rlhf_artifacts("list", what, *more)


def test_an_empty_store_has_nothing_to_list_and_that_is_no_mistake(
    tmp_path: Path, rlhf_artifacts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_STORE_URL", (tmp_path / "empty").as_uri())
    assert rlhf_artifacts("list").endswith("holds no artifact\n")
    assert "holds no artifact of policy/quickstart" in rlhf_artifacts("list", "policy/quickstart")
    assert json.loads(rlhf_artifacts("list", "policy/quickstart", "--json")) == []


def test_show_gives_the_manifest(rlhf_artifacts: Any, store: ArtifactStore) -> None:
    shown = json.loads(rlhf_artifacts("show", "policy/quickstart@champion", "--json"))
    manifest = store.resolve("policy/quickstart@1")
    assert (shown["uri"], shown["digest"], shown["writer"]) == (manifest.uri, manifest.digest, manifest.writer)
    assert [parent["uri"] for parent in shown["parents"]] == ["sft/quickstart@1", "dataset/sorting@1"]
    assert shown["aliases"]["champion"][0]["why"] == "first"
    text = rlhf_artifacts("show", "policy/quickstart")
    for expected in ("policy/quickstart@2", "sft/quickstart@1, dataset/sorting@1", "c/d", '"reward": 0.25'):
        assert expected in text


def test_fetch_writes_the_files(rlhf_artifacts: Any, tmp_path: Path) -> None:
    told = json.loads(rlhf_artifacts("fetch", "policy/quickstart", tmp_path / "out", "--json"))
    assert told["uri"] == "policy/quickstart@2"
    assert (tmp_path / "out" / "w").read_bytes() == b"1"
    assert (tmp_path / "out" / "c" / "d").read_bytes() == b"{}"
    assert "policy/quickstart@1: 2 files, 3 B, in" in rlhf_artifacts("fetch", "policy/quickstart@1", tmp_path / "other")
    with pytest.raises(StoreError, match="policy/quickstart@2 is whole, not adapters over another model"):
        rlhf_artifacts("fetch", "policy/quickstart", tmp_path / "third", "--model", tmp_path)


def test_lineage_shows_a_shared_ancestor_once_with_its_own_parents(rlhf_artifacts: Any) -> None:
    policy, *ancestors = json.loads(rlhf_artifacts("lineage", "policy/quickstart", "--json"))
    parents = {each["uri"]: [parent["uri"] for parent in each["parents"]] for each in (policy, *ancestors)}
    assert policy["uri"] == "policy/quickstart@2"
    assert parents == {
        "policy/quickstart@2": ["sft/quickstart@1", "dataset/sorting@1"],
        "sft/quickstart@1": ["dataset/sorting@1", "model/smollm2"],
        "dataset/sorting@1": [],
        "model/smollm2": [],
    }
    assert [each["uri"] for each in ancestors if each["external"]] == ["model/smollm2"]
    lines = rlhf_artifacts("lineage", "policy/quickstart").splitlines()
    assert [line.lstrip("│├└─ ").split()[0] for line in lines] == [
        "policy/quickstart@2",
        "sft/quickstart@1",
        "dataset/sorting@1",
        "model/smollm2",
        "dataset/sorting@1",
    ]


def test_lineage_shows_brackets_as_they_are(rlhf_artifacts: Any, store: ArtifactStore) -> None:
    store.commit("policy", "odd", {"w": b"1"}, parents=["model/[v2]/[/nope]"])
    assert "model/[v2]/[/nope]  from outside" in rlhf_artifacts("lineage", "policy/odd")


def test_an_unknown_reference_is_the_stores_error(rlhf_artifacts: Any) -> None:
    for verb in (("show",), ("lineage",), ("fetch", "unused")):
        with pytest.raises(ReferenceNotFoundError, match="did you mean policy/quickstart"):
            rlhf_artifacts(verb[0], "policy/quikstart", *verb[1:])
