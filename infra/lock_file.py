"""What a lock file names for the Python that runs: some packages are for other versions alone."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement


def locked_packages(file: Path) -> list[Requirement]:
    """Return the packages of a lock file that are for the Python that runs, each with its one version."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    packages = [Requirement(line) for line in lines if line]
    return [each for each in packages if each.marker is None or each.marker.evaluate()]
