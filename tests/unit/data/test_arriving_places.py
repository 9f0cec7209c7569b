"""Where data arrive: directories at any depth, patterns, objects of a bucket that are read once, commits of the hub."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import ArrivalsConfig, DataConfig, SourceConfig
from rlhf_core.data.arriving import Arrived, KnownFile, Ledger, RowMarks, files_of, is_anything_new, read_new
from rlhf_core.data.reading import Access, places
from rlhf_core.errors import DataAwayError, DataError

NOW = datetime.now(UTC)


def names(path: str | Path, tmp_path: Path) -> list[str]:
    found = files_of(SourceConfig(path=str(path)), Access(tmp_path / "cache"), NOW)
    return [Path(each.name).name for each in found]


def put(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_a_directory_is_read_at_any_depth_but_for_what_is_hidden_or_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    assert names(folder, tmp_path) == []
    put(folder / "b.jsonl", "b")
    put(folder / "2026-11-27" / "a.jsonl", "a")
    put(folder / ".c.jsonl", "c")
    put(folder / "d.jsonl.part", "d")
    assert names(folder, tmp_path) == ["a.jsonl", "b.jsonl"]
    assert names(folder / "*.jsonl", tmp_path) == ["b.jsonl"]
    assert names(folder / "x-*.jsonl", tmp_path) == [], "nothing has arrived yet"
    for wrong in (tmp_path / "inn", tmp_path / "inn" / "*.jsonl"):
        with pytest.raises(DataError, match="does not exist"):
            names(wrong, tmp_path)


def test_a_link_to_nothing_is_a_bad_file_and_stops_no_other(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.jsonl", "a")
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    found = read(str(tmp_path / "in"), tmp_path)
    assert [row.prompt for row in found.roles["prompts"].rows] == ["a"]
    assert "leads nowhere" in found.bad[0].told


def read(path: str, tmp_path: Path, ledger: Ledger | None = None, **options: Any) -> Arrived:
    config = DataConfig(prompts=(SourceConfig(path=path),), arrivals=ArrivalsConfig(settle_s=0))
    access = Access(tmp_path / "cache", dict)
    later = NOW + timedelta(hours=1)
    return read_new(config, ledger or Ledger(as_of=NOW), RowMarks(), access, None, as_of=options.get("as_of", later))


class Bucket:
    """As much of fsspec's S3 file system as is asked of it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.is_away = False

    def info(self, name: str) -> dict[str, Any]:
        if self.is_away:
            raise ConnectionError("no route")
        name = name.removeprefix("s3://")
        if name == "team":
            return {"name": name, "type": "directory", "size": 0}
        body = self.objects.get(name)
        if body is None:
            raise FileNotFoundError(name)
        tag = f'"{hash(body)}"'
        return {"name": name, "type": "file", "size": len(body), "ETag": tag, "LastModified": NOW}

    def ls(self, prefix: str, *, detail: bool) -> list[Any]:
        prefix = prefix.removeprefix("s3://")
        found = [self.info(name) for name in self.objects if name.startswith(prefix)]
        if not found:
            raise FileNotFoundError(prefix)
        return found if detail else [each["name"] for each in found]

    def get_file(self, name: str, to: str) -> None:
        self.fetched.append(name.rpartition("/")[2])
        Path(to).write_bytes(self.objects[name.removeprefix("s3://")])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    found = Bucket()
    monkeypatch.setattr(places, "_file_system", lambda *_: found)
    return found


def test_objects_whose_tag_and_size_are_known_are_not_fetched_again(bucket: Bucket, tmp_path: Path) -> None:
    assert read("s3://team/in/", tmp_path).files == [], "an empty prefix is no mistake"
    with pytest.raises(DataError, match="no such object"):
        read("s3://tean/in/", tmp_path)
    bucket.objects["team/in/a.jsonl"] = b'{"prompt": "a"}\n'
    bucket.objects["team/in/b.jsonl"] = b'{"prompt": '
    found = read("s3://team/in/", tmp_path)
    assert (len(found.new), len(found.bad)) == (2, 1)
    ledger = Ledger(as_of=NOW, files=tuple(found.files))
    (tmp_path / "cache").rename(tmp_path / "another machine's")
    bucket.fetched.clear()
    bucket.objects["team/in/c.jsonl"] = b'{"prompt": "c"}\n'
    found = read("s3://team/in/", tmp_path, ledger)
    assert bucket.fetched == ["c.jsonl"]
    assert [row.prompt for row in found.roles["prompts"].rows] == ["c"]
    bucket.objects["team/in/b.jsonl"] = b'{"prompt": "b"}\n'
    assert [row.prompt for row in read("s3://team/in/", tmp_path, ledger).roles["prompts"].rows] == ["b", "c"]


def test_a_server_that_is_away_puts_nothing_into_quarantine(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects["team/in/a.jsonl"] = b'{"prompt": "a"}\n'
    bucket.is_away = True
    with pytest.raises(DataAwayError):
        read("s3://team/in/", tmp_path)


def test_of_a_hub_set_the_newest_commit_of_the_day_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    commits = [SimpleNamespace(commit_id=f"{n}" * 40, created_at=NOW - timedelta(days=n)) for n in range(3)]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_commits", lambda *_, **__: commits)
    source = SourceConfig(path="team/pairs")
    access = Access(tmp_path / "cache")
    [newest] = files_of(source, access, NOW)
    [older] = files_of(source, access, NOW - timedelta(days=1.5))
    assert (newest.tag, older.tag) == ("0" * 40, "2" * 40)
    assert newest.digest() != older.digest()
    assert files_of(source, access, NOW - timedelta(days=9)) == []


def test_what_was_written_after_a_time_is_left_to_a_later_night(tmp_path: Path) -> None:
    file = put(tmp_path / "in" / "a.jsonl", "a")
    os.utime(file, (NOW.timestamp(), NOW.timestamp()))
    assert read(str(tmp_path / "in"), tmp_path, as_of=NOW - timedelta(minutes=1)).files == []
    assert len(read(str(tmp_path / "in"), tmp_path, as_of=NOW).files) == 1


def test_a_known_file_is_new_to_nobody_until_how_it_is_read_changes(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.jsonl", " ")
    config = DataConfig(prompts=(SourceConfig(path=str(tmp_path / "in")),), arrivals=ArrivalsConfig(settle_s=0))
    later, access = NOW + timedelta(hours=1), Access(tmp_path / "cache")
    config = config.model_copy(update={"arrivals": ArrivalsConfig(settle_s=0, max_bad_files=1)})
    found = read_new(config, Ledger(as_of=NOW), RowMarks(), access, None, as_of=later)
    assert [each.fault is None for each in found.files] == [False]
    ledger = Ledger(as_of=NOW, files=tuple(KnownFile.model_validate(each.model_dump()) for each in found.files))
    assert not is_anything_new(config, ledger, access, later)
    assert is_anything_new(config.model_copy(update={"bad_rows": "drop"}), ledger, access, later)


@pytest.mark.parametrize("given", [{"weight": 1.0}, {"limit": 5}])
def test_what_takes_a_part_of_the_rows_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every row is learnt once"):
        DataConfig(prompts=(SourceConfig(path="in", **given),), arrivals=ArrivalsConfig())


def test_two_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        ArrivalsConfig(window_nights=2, window_days=3)
