from pathlib import Path

import pytest

from infra.clusters.code_version import code_digests


def test_a_package_is_known_by_the_content_and_place_of_its_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "made_up_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is read, not run')")
    (package / "inner" / "a.py").write_text("A = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = [code_digests([package.name])[package.name]]
    (package / "data.json").write_text("{}")
    assert code_digests([package.name])[package.name] == seen[0]  # no code
    (package / "inner" / "a.py").write_text("A = 2")
    seen.append(code_digests([package.name])[package.name])
    (package / "inner" / "a.py").rename(package / "inner" / "b.py")
    seen.append(code_digests([package.name])[package.name])
    assert len(set(seen)) == 3
    assert code_digests(["no_such_package"]) == {"no_such_package": ""}
