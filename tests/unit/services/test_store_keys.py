"""The keys of the local store: made once, made anew where they are no longer good, and never ending."""

import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from infra.errors import ServiceError
from infra.services import seaweed
from infra.services.seaweed import KEYS_FILE, keys_environment, make_keys


def made(home: Path) -> bytes:
    """Make the keys, and see that nothing was said and that they are the owner's alone."""
    said: list[str] = []
    make_keys(home, said.append)
    assert said == []
    assert (home / KEYS_FILE).stat().st_mode & 0o777 == 0o600
    return (home / KEYS_FILE).read_bytes()


def test_the_keys_are_made_once(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        keys = made(tmp_path)
    finally:
        os.umask(former)
    assert made(tmp_path) == keys
    assert keys_environment(tmp_path) == keys_environment(tmp_path)


def test_no_secret_is_in_what_a_process_list_shows_or_in_two_stores(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for home in (one, other):
        home.mkdir()
        made(home)
    signed = [{value for name, value in keys_environment(home).items() if "JWT" in name} for home in (one, other)]
    assert len(signed[0]) == 4
    assert not signed[0] & signed[1]
    service = seaweed.seaweed(one, dict.fromkeys(seaweed.PORT_NAMES, 1), tmp_path)
    assert not [word for word in service.command for secret in signed[0] if secret in word]


def test_the_certificate_outlives_everybody_and_any_clock(tmp_path: Path) -> None:
    certificate = x509.load_pem_x509_certificate(made(tmp_path))
    assert certificate.not_valid_after_utc.year == 9999
    assert certificate.not_valid_before_utc.year == 2000


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl's command is not here")
def test_openssl_takes_the_certificate_a_hundred_years_from_now(tmp_path: Path) -> None:
    made(tmp_path)
    then = int((datetime.now(UTC) + timedelta(days=36500)).timestamp())
    pem = str(tmp_path / KEYS_FILE)
    said = subprocess.run(
        ["openssl", "verify", "-attime", str(then), "-CAfile", pem, pem], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def of_another(path: Path) -> None:
    """Put another store's key beside the certificate."""
    home = path.parent / "other"
    home.mkdir()
    other = made(home)
    certificate, begin, _ = path.read_bytes().partition(b"-----BEGIN PRIVATE KEY")
    path.write_bytes(certificate + begin + other.partition(b"-----BEGIN PRIVATE KEY")[2])


def ends_tomorrow(path: Path) -> None:
    pem = path.read_bytes()
    old, key = x509.load_pem_x509_certificate(pem), serialization.load_pem_private_key(pem, None)
    new = (
        x509.CertificateBuilder()
        .issuer_name(old.issuer)
        .subject_name(old.subject)
        .public_key(old.public_key())
        .serial_number(old.serial_number)
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    path.write_bytes(new.public_bytes(serialization.Encoding.PEM) + pem[pem.index(b"-----BEGIN PRIVATE") :])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: path.chmod(0o640), "could be read by others"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_bytes(b"\xff\x00"), "is damaged"),
        (cut_off, "is damaged"),
        (of_another, "its key is another certificate's"),
        (ends_tomorrow, "has a certificate that ends"),
    ],
)
def test_keys_that_are_no_longer_good_are_made_anew_with_a_sentence(
    tmp_path: Path, damage: Callable[[Path], None], fault: str
) -> None:
    old, path = made(tmp_path), tmp_path / KEYS_FILE
    damage(path)
    said: list[str] = []
    make_keys(tmp_path, said.append)
    (sentence,) = said
    assert fault in sentence
    assert "was made anew, and nothing stored depends on it" in sentence
    assert made(tmp_path) != old


def test_lost_keys_are_made_anew_without_a_word(tmp_path: Path) -> None:
    old = made(tmp_path)
    (tmp_path / KEYS_FILE).unlink()
    assert made(tmp_path) != old


def test_what_is_no_file_is_left_to_the_user(tmp_path: Path) -> None:
    (tmp_path / KEYS_FILE).mkdir()
    with pytest.raises(ServiceError, match=r"cannot be written \(Is a directory\); move away what is there"):
        make_keys(tmp_path, lambda _: None)


def test_a_secret_that_others_could_read_is_drawn_anew_once_nothing_holds_it(tmp_path: Path) -> None:
    said: list[str] = []
    seaweed.prepare(tmp_path, said.append, is_down=True)
    secret = seaweed.load_secret(tmp_path)
    (tmp_path / "store.secret").chmod(0o644)
    seaweed.prepare(tmp_path, said.append, is_down=False)
    assert seaweed.load_secret(tmp_path) == secret
    assert "run `rlhf down` and `rlhf up`" in said.pop()
    seaweed.prepare(tmp_path, said.append, is_down=True)
    assert seaweed.load_secret(tmp_path) != secret
    assert (tmp_path / "store.secret").stat().st_mode & 0o777 == 0o600
    assert "another secret was drawn" in said.pop()
    assert said == []


def test_a_secret_that_is_lost_beside_runs_that_hold_it_is_written_again(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "stack.env").write_text("RLHF_S3_SECRET_KEY='held'\n")
    seaweed.prepare(tmp_path, said.append, is_down=False)
    assert seaweed.load_secret(tmp_path) == "held"
    assert "was lost, and is written again" in said.pop()
    (tmp_path / "store.secret").unlink()
    seaweed.prepare(tmp_path, said.append, is_down=True)
    assert seaweed.load_secret(tmp_path) != "held"
    assert said == []


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_damaged_secret_is_drawn_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "store.secret").write_bytes(content)
    assert len(seaweed.load_secret(tmp_path)) == 48


def test_a_secret_that_is_no_file_is_left_to_the_user(tmp_path: Path) -> None:
    place = tmp_path / "store.secret"
    place.mkdir(mode=0o755)
    with pytest.raises(
        ServiceError, match=r"store\.secret cannot be written \(Is a directory\); move away what is there"
    ):
        seaweed.prepare(tmp_path, lambda _: None, is_down=True)
    with pytest.raises(ServiceError, match=r"store\.secret cannot be read \(Is a directory\); move away what is there"):
        seaweed.load_secret(tmp_path)


def test_what_another_has_put_where_a_socket_was_stays_and_hinders_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweed, "_SOCKETS", tmp_path)
    his, ours = tmp_path / "seaweedfs-master-grpc-7.sock", tmp_path / "seaweedfs-s3-grpc-8.sock"
    his.mkdir()  # a file of his in /tmp cannot be removed either
    ours.touch()
    seaweed.remove_sockets({"master_grpc": 7, "s3_grpc": 8})
    assert [his] == list(tmp_path.iterdir())
