"""A stored directory is whole or as it was, wherever its writer ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.coati.script.models import replace_directory


def _write(text: str, directory: Path) -> None:
    def write(fresh: Path) -> None:
        (fresh / "weights").write_text(text)

    replace_directory(directory, write)


def _renames(monkeypatch: pytest.MonkeyPatch, *, until: int) -> None:
    """Let so many directories be renamed, and end the process at the next."""
    rename = Path.rename
    done: list[Path] = []

    def limited(path: Path, target: Path) -> Path:
        if len(done) == until:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", limited)


@pytest.mark.parametrize("until", [0, 1])
def test_a_directory_is_as_it_was_after_its_writer_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: int
) -> None:
    place = tmp_path / "modeling"
    _write("first", place)
    with monkeypatch.context() as patched:
        _renames(patched, until=until)
        with pytest.raises(KeyboardInterrupt):
            _write("second", place)
    with pytest.raises(OSError, match="full"):
        replace_directory(place, _fails)
    assert (place / "weights").read_text() == "first"
    _write("third", place)
    assert (place / "weights").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["modeling"]


def test_nothing_stays_of_an_earlier_directory(tmp_path: Path) -> None:
    place = tmp_path / "modeling"
    place.mkdir()
    (place / "stale").touch()
    (tmp_path / "modeling.old").mkdir()
    _write("new", place)
    assert [path.name for path in place.iterdir()] == ["weights"]
    assert not (tmp_path / "modeling.old").exists()


def _fails(directory: Path) -> None:
    raise OSError(f"no room in {directory}: the disk is full")
