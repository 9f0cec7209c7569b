"""The manifest's form is documented, and what is documented is what is written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infra.artifacts import ArtifactRef, ArtifactStore, open_store
from infra.artifacts.manifest import FileEntry, Manifest, check_path, manifest_schema, schema_text
from infra.artifacts.ref import version_key
from infra.errors import StoreError

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "manifest.schema.json"
RULE = jsonschema.Draft202012Validator(json.loads(DOCUMENT.read_text()), format_checker=jsonschema.FormatChecker())


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


def written(store: ArtifactStore, root: Path) -> dict[str, Any]:
    """A manifest as it lies in the store, every field of it filled."""
    parent = ArtifactRef("model/smollm2-135m-instruct", "0" * 64)
    metrics = {"loss": float("nan"), "kl": [1.0]}
    store.commit(
        "policy", "p", {"a/b.json": b"{}", "c": b""}, key="k", parents=[parent], config={"lr": 1e-5}, metrics=metrics,
        source_digest="feed", flow_run="run",
    )  # fmt: skip
    content: dict[str, Any] = json.loads((root / version_key("policy", "p", 1)).read_bytes())
    return content


def test_the_documented_schema_is_the_codes() -> None:
    assert DOCUMENT.read_text() == schema_text(), (
        "the manifest's form has changed: raise the minor version in infra/artifacts/manifest.py if a field came, then "
        "write what schema_text() returns to docs/manifest.schema.json"
    )


def test_every_field_says_what_it_means() -> None:
    schema = manifest_schema()
    forms = [schema, *(form for form in schema["$defs"].values() if "properties" in form)]
    for form in forms:
        assert form["description"]
        for name, field in form["properties"].items():
            assert field.get("description"), name
    assert set(schema["properties"]) == set(Manifest.model_fields)


def test_what_is_written_is_as_documented(store: ArtifactStore, tmp_path: Path) -> None:
    content = written(store, tmp_path / "store")
    RULE.validate(content)
    assert set(content) == set(manifest_schema()["properties"])


def test_what_a_later_minor_version_adds_is_allowed(store: ArtifactStore, tmp_path: Path) -> None:
    content = written(store, tmp_path / "store") | {"schema_version": "1.9", "surprise": {"a": 1}}
    RULE.validate(content)
    assert Manifest.from_json(json.dumps(content).encode(), "it").uri == "policy/p@1"
    RULE.validate(content | {"schema_version": 1})  # the first form


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": "2.0"},
        {"schema_version": 2},
        {"schema_version": "1"},
        {"kind": "polcy"},
        {"name": "../p"},
        {"name": "p" * 129},
        {"version": -1},
        {"version": 100_000_000},
        {"digest": "F" * 64},
        {"key": "../k"},
        {"files": [{"path": "a", "size": -1, "sha256": "0" * 64}]},
        {"files": [{"path": "a", "size": 1}]},
        {"files": [{"path": "../a", "size": 1, "sha256": "0" * 64}]},
        {"created": "yesterday"},
        {"writer": None},
    ],
    ids=str,
)
def test_what_the_schema_refuses_the_code_refuses(store: ArtifactStore, tmp_path: Path, change: dict[str, Any]) -> None:
    content = written(store, tmp_path / "store") | change
    if change != {"created": "yesterday"}:  # a format is checked only where a checker for it is installed
        assert not RULE.is_valid(content)
    if change != {"schema_version": "1"}:  # text that no release wrote, and that does no harm
        with pytest.raises(StoreError, match="the manifest it cannot be read"):
            Manifest.from_json(json.dumps(content).encode(), "it")


PATHS = ["a", "a/b.json", ".hidden", "a b/c", "ünï", "..a", "a..", "...", "a/...", "", ".", "..", "/a", "//a", "a/"]
PATHS += ["./a", "a/.", "a/./b", "../a", "a/..", "a/../b", "a//b", "a\\b", "C:\\a"]


@pytest.mark.parametrize("path", PATHS)
def test_paths_are_judged_alike(path: str) -> None:
    try:
        check_path(path)
    except StoreError:
        allowed = False
    else:
        allowed = True
    form = manifest_schema()["$defs"]["FileEntry"]
    rule = jsonschema.Draft202012Validator({**form, "$defs": manifest_schema()["$defs"]})
    entry = FileEntry(path="good", size=0, sha256="0" * 64).model_dump(mode="json") | {"path": path}
    assert rule.is_valid(entry) == allowed
