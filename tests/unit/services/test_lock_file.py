"""The lock files name all that is needed, in a release that will do, for each Python that is accepted."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from infra.lock_file import locked_packages
from infra.settings import CHECKOUT

LOCKS = (CHECKOUT / "requirements.txt", CHECKOUT / "requirements-dev.txt")
PYTHONS = ("3.11", "3.12", "3.13")
CUDA = ("cuda-", "nvidia-", "triton")
"""What torch with CUDA brings along, and names the releases of itself; torch for the CPU asks for none of it."""


def holds(requirement: Requirement, python: str, extra: str = "") -> bool:
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate({**environment, "extra": extra})


def locked(python: str) -> dict[str, str]:
    """Return the release of each package that is locked for a Python."""
    lines = [Requirement(line) for file in LOCKS for line in file.read_text().splitlines()]
    return {each.name: str(each.specifier).removeprefix("==") for each in lines if holds(each, python)}


def unmet(requirement: Requirement, python: str, releases: Mapping[str, str], seen: set[str]) -> list[str]:
    """Return what a requirement, and all that it leads to, asks for and does not get."""
    name = canonicalize_name(requirement.name)
    if name.startswith(CUDA) or str(requirement) in seen:
        return []
    seen.add(str(requirement))
    if name not in releases or not requirement.specifier.contains(releases[name], prereleases=True):
        return [f"{requirement} (locked: {releases.get(name, 'nothing')})"]
    try:
        asked = [Requirement(each) for each in requires(name) or []]
    except PackageNotFoundError:  # it is for other versions than the one that runs
        return []
    extras = ("", *requirement.extras)
    wanted = [each for each in asked if any(holds(each, python, extra) for extra in extras)]
    return [fault for each in wanted for fault in unmet(each, python, releases, seen)]


@pytest.mark.parametrize("python", PYTHONS)
def test_all_that_is_needed_is_locked_for_each_python(python: str) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(f"{python}.1")
    releases, seen = locked(python), set[str]()
    asked = [*project["dependencies"], *(f"{name}=={release}" for name, release in releases.items())]
    assert [fault for each in asked for fault in unmet(Requirement(each), python, releases, seen)] == []
    assert len(seen) > len(releases)


@pytest.mark.parametrize(("python", "own"), [("3.11", {"pendulum"}), ("3.12", {"pendulum"}), ("3.13", {"whenever"})])
def test_a_package_for_other_versions_is_left_out(python: str, own: set[str]) -> None:
    assert {"pendulum", "whenever"} & set(locked(python)) == own


def test_what_stands_beside_the_lock_changes_nothing_of_it() -> None:
    beside = [Requirement(line) for line in (CHECKOUT / "requirements-vllm.txt").read_text().splitlines()]
    assert {each.name for each in beside}.isdisjoint(locked("3.11"))
    assert all(str(each.specifier).startswith("==") for each in beside)


def test_no_other_python_is_accepted() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    accepted = SpecifierSet(project["requires-python"])
    assert [f"3.{minor}" for minor in range(20) if accepted.contains(f"3.{minor}.1")] == list(PYTHONS)


def test_comments_and_packages_of_other_versions_are_not_read(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.txt"
    lock.write_text("# made by uv\n\na==1.0  # why\nb==2.0; python_version < '3'\nc==3.0; python_version >= '3'\n")
    assert [f"{each.name}{each.specifier}" for each in locked_packages(lock)] == ["a==1.0", "c==3.0"]
