"""Which PostgreSQL serves a home, and what is said where none can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.errors import ServiceError, SettingsError
from infra.services import doctor, postgres
from infra.services.bring_up import up
from infra.settings import Settings, settings


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_USUAL_PLACES", ())
    monkeypatch.setattr(postgres, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    for name in ("RLHF_DATABASE", "RLHF_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


def install(directory: Path, version: str, *, trigrams: bool = True) -> None:
    """Put programs there that say which release they are, and where their extensions lie."""
    directory.mkdir(parents=True)
    extensions = directory / "share" / "extension"
    extensions.mkdir(parents=True)
    if trigrams:
        (extensions / "pg_trgm.control").touch()
    says = {
        "postgres": f"postgres (PostgreSQL) {version} (Debian)",
        "initdb": "",
        "pg_config": str(directory / "share"),
    }
    for name, words in says.items():
        (directory / name).write_text(f"#!/bin/sh\necho '{words}'\n")
        (directory / name).chmod(0o755)


def test_the_newest_serves_a_new_home_and_the_release_that_made_it_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("9.6.24", "15.18", "18.6"):
        install(tmp_path / "usr" / version / "bin", version)
    monkeypatch.setattr(postgres, "_USUAL_PLACES", (f"{str(tmp_path)[1:]}/usr/*/bin",))
    assert postgres.installation(tmp_path).version == "18.6"
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").write_text("15\n")
    assert postgres.installation(tmp_path).version == "15.18"


def test_where_there_is_none_it_is_told_before_anything_starts(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pytest.raises(ServiceError, match="no PostgreSQL of release 14 or later is installed here; install one"):
        up(Settings(home=home, database="postgres"), lambda _: None)
    assert not (home / "postgres").exists()
    [finding] = doctor._database(Settings(home=home, database="postgres"))
    assert finding.verdict == "wrong"
    assert list(doctor._database(Settings(home=home))) == []


def test_one_without_the_extension_that_the_server_needs_is_told(tmp_path: Path) -> None:
    install(tmp_path / "bin", "16.2", trigrams=False)
    with pytest.raises(ServiceError, match=r"has no extension pg_trgm, .* install it \(postgresql-contrib\)"):
        postgres.installation(tmp_path)


def test_data_of_a_release_that_is_gone_are_left_as_they_are(tmp_path: Path) -> None:
    install(tmp_path / "bin", "18.6")
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").write_text("15\n")
    with pytest.raises(ServiceError, match="was made by PostgreSQL 15, which is not installed here"):
        postgres.installation(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account")
def test_root_without_setpriv_is_told(tmp_path: Path) -> None:
    install(tmp_path / "bin", "18.6")
    with pytest.raises(ServiceError, match="does not run as root, and there is no setpriv"):
        postgres.postgres(tmp_path, tmp_path, None)


def test_a_database_of_the_users_own_and_one_of_the_stacks_are_not_asked_for_at_once(tmp_path: Path) -> None:
    both = Settings(home=tmp_path / "home", database="postgres", database_url="postgresql+asyncpg://me@db/prefect")
    assert not both.wants_local_postgres
    with pytest.raises(ServiceError, match="unset one"):
        up(both, lambda _: None)


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_DATABASE", "mysql")
    with pytest.raises(SettingsError, match="RLHF_DATABASE is 'mysql': input should be 'sqlite' or 'postgres'"):
        settings()


def test_what_answers_as_no_database_does_is_none(tmp_path: Path) -> None:
    assert not postgres.answers(str(tmp_path / "socket"))
