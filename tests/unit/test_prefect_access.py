"""Who we are to a Prefect server: to each what is its own, and to nobody else's."""

from __future__ import annotations

import json
import os
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from infra import loopback, prefect_access
from infra.errors import ServiceError, SettingsError
from infra.prefect_access import PASSWORD_FILE, access_to, know_stack_of
from infra.services import prefect_api
from infra.settings import STACK_ENV, settings

LOCAL = "http://127.0.0.1:4200/api"
VARIABLES = (
    "PREFECT_API_URL",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "PREFECT_API_SSL_CERT_FILE",
    "PREFECT_API_TLS_INSECURE_SKIP_VERIFY",
    "PREFECT_CLIENT_CUSTOM_HEADERS",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home as `rlhf up` leaves it, `.env` included, and nothing else said."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("RLHF_HOME", str(home))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setattr(prefect_access, "_FURTHER_HOMES", {})  # other tests of this process name stacks too
    told = f"PREFECT_API_URL='{LOCAL}'\nPREFECT_API_AUTH_STRING='rlhf:local'\n"
    for path in (home / STACK_ENV, tmp_path / ".env"):
        path.write_text(told)
    return home


class Server(HTTPServer):
    """One that writes down how it was asked, and answers as it is told to."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.status, self.location, self.is_cut_off = 200, "", False
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                server.asked.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(server.status)
                if server.location:
                    self.send_header("Location", server.location)
                if server.is_cut_off:
                    self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b"true")

        super().__init__(("127.0.0.1", 0), Handler)

    def url(self, scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.server_port}/api"


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with Server() as one, Server() as other:
        for server in (one, other):
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield one, other
        for server in (one, other):
            server.shutdown()


def basic(auth_string: str) -> str:
    return f"Basic {b64encode(auth_string.encode()).decode()}"


@pytest.mark.parametrize("url", [LOCAL, "http://localhost:4200/api/", "http://127.0.0.1:4200"])
def test_the_local_server_gets_its_password_whatever_is_exported(
    home: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:elsewhere")
    monkeypatch.setenv("PREFECT_API_KEY", "key")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"Authorization": "Bearer of the gateway"}')
    access = access_to(url)
    assert access.all_headers == {"Authorization": basic("rlhf:local")}
    assert access.source == str(home / PASSWORD_FILE)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:4201/api",
        "https://127.0.0.1:4200/api",
        "http://[::1]:4200/api",  # where another user can listen while the stack is up
        "http://prefect.example/api",
    ],
)
def test_no_other_server_gets_the_local_ones_password(home: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    assert home.is_dir()
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert settings().prefect_api_auth_string is None
    assert access_to(url).all_headers == {}
    monkeypatch.setenv("PREFECT_API_KEY", "key")
    assert access_to(url).all_headers == {"Authorization": "Bearer key"}


@pytest.mark.parametrize("exported", ["https://team.example/api", "http://127.0.0.1:4201/api"])
def test_a_password_beside_another_address_in_the_env_file_goes_to_no_server_but_that(
    home: Path, monkeypatch: pytest.MonkeyPatch, exported: str
) -> None:
    """The file is of one stack, the home that is exported of another or of none."""
    other = home.parent / "other"
    other.mkdir()
    monkeypatch.setenv("RLHF_HOME", str(other))
    monkeypatch.setenv("PREFECT_API_URL", exported)
    assert settings().prefect_api_auth_string is None
    assert access_to(exported).all_headers == {}
    monkeypatch.setenv("PREFECT_API_URL", LOCAL)
    assert access_to(LOCAL).auth_string == "rlhf:local"


def test_a_password_in_the_env_file_without_an_address_is_for_the_server_that_is_exported(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.parent / ".env").write_text("PREFECT_API_AUTH_STRING='me:there'\n")
    monkeypatch.setenv("PREFECT_API_URL", "https://team.example/api")
    assert access_to("https://team.example/api").auth_string == "me:there"


def test_a_server_that_moved_keeps_its_password_where_the_env_file_is_old(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = "http://127.0.0.1:4201/api"
    (home / STACK_ENV).write_text(f"PREFECT_API_URL='{moved}'\nPREFECT_API_AUTH_STRING='rlhf:local'\n")
    monkeypatch.setenv("PREFECT_API_URL", moved)
    assert settings().prefect_api_auth_string is not None


def is_local(home: Path, server: Server) -> None:
    """Have a server pass for the local stack's."""
    (home / STACK_ENV).write_text(f"PREFECT_API_URL='{server.url()}'\nPREFECT_API_AUTH_STRING='rlhf:local'\n")


def test_the_local_server_is_asked_by_the_address_at_which_it_listens(
    home: Path, servers: tuple[Server, Server]
) -> None:
    server = servers[0]
    is_local(home, server)
    assert prefect_api.call(server.url(host="localhost"), "GET", "/admin/version") is True
    assert server.asked[0]["host"] == f"127.0.0.1:{server.server_port}"
    assert server.asked[0]["authorization"] == basic("rlhf:local")


def test_another_user_at_the_local_servers_port_is_told_nothing(
    home: Path, servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = servers[0]
    is_local(home, server)
    table = tmp_path / "tcp"  # as Linux writes it: address and port, of the other side, state, queues, timers, user
    line = "0: 0100007F:{:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {} 0 1 1\n"
    monkeypatch.setattr(loopback, "_TABLE", table)
    table.write_text("head\n" + line.format(server.server_port, os.geteuid() + 1))
    with pytest.raises(
        ServiceError, match=r"does not answer \(\[Errno 111\] a program of another user listens there\)"
    ):
        prefect_api.call(server.url(), "GET", "/admin/version")
    assert server.asked == []
    table.write_text("head\n" + line.format(server.server_port, os.geteuid()))
    assert prefect_api.call(server.url(), "GET", "/admin/version") is True


def test_whoever_is_asked_whether_he_lives_is_not_told_who_we_are(home: Path, servers: tuple[Server, Server]) -> None:
    is_local(home, servers[0])
    assert prefect_api.is_healthy(servers[0].url())
    assert "authorization" not in servers[0].asked[0]


def test_a_server_of_ones_own_is_told_all_that_was_set_for_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, servers: tuple[Server, Server]
) -> None:
    assert home.is_dir()
    server = servers[0]
    monkeypatch.setenv("PREFECT_API_URL", server.url())
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:there")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Gateway": "pass"}')
    assert prefect_api.call(server.url(), "GET", "/admin/version") is True
    assert (server.asked[0]["authorization"], server.asked[0]["x-gateway"]) == (basic("me:there"), "pass")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"authorization": "Bearer of the gateway"}')
    prefect_api.call(server.url(), "GET", "/admin/version")
    assert server.asked[1]["authorization"] == "Bearer of the gateway", "as Prefect's own client has it"


def test_whom_a_server_points_at_is_not_told_who_we_are(
    home: Path, monkeypatch: pytest.MonkeyPatch, servers: tuple[Server, Server]
) -> None:
    assert home.is_dir()
    server, other = servers
    server.status, server.location = 302, other.url()
    monkeypatch.setenv("PREFECT_API_URL", server.url())
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:there")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Gateway": "pass"}')
    assert prefect_api.call(server.url(), "GET", "/admin/version") is True
    assert "authorization" in server.asked[0]
    assert other.asked[0].keys().isdisjoint({"authorization", "x-gateway"})


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "asks for a password; set PREFECT_API_AUTH_STRING to its user:password, or PREFECT_API_KEY"),
        (
            {"PREFECT_API_AUTH_STRING": "me:hunter2"},
            "does not take PREFECT_API_AUTH_STRING as it is exported; unset it, or set it to its user:password",
        ),
        (
            {"PREFECT_API_KEY": "hunter2"},
            "does not take PREFECT_API_KEY as it is exported; correct it",
        ),
    ],
)
def test_a_server_that_refuses_is_told_by_what_it_refused(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    servers: tuple[Server, Server],
    variables: dict[str, str],
    told: str,
) -> None:
    assert home.is_dir()
    server = servers[0]
    server.status = 401
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ServiceError) as caught:
        prefect_api.call(server.url(), "GET", "/admin/version")
    assert str(caught.value) == f"the Prefect server at {server.url()} {told}"


def test_a_server_that_dies_within_its_answer_does_not_answer(home: Path, servers: tuple[Server, Server]) -> None:
    assert home.is_dir()
    servers[0].is_cut_off = True
    with pytest.raises(ServiceError, match=r"does not answer \(IncompleteRead\(4 bytes read, 96 more expected\)\)"):
        prefect_api.call(servers[0].url(), "GET", "/admin/version")


def test_a_local_server_that_refuses_our_password_is_told_by_its_file(
    home: Path, servers: tuple[Server, Server]
) -> None:
    server = servers[0]
    server.status = 401
    is_local(home, server)
    with pytest.raises(ServiceError) as caught:
        prefect_api.call(server.url(), "GET", "/admin/version")
    assert str(caught.value) == (
        f"the Prefect server at {server.url()} does not take the password in {home / PASSWORD_FILE}: it is another "
        "stack's, or was started with another password; run `rlhf up`, which brings both together"
    )


def test_a_stack_in_another_home_is_known_once_it_was_named(home: Path, tmp_path: Path) -> None:
    assert home.is_dir()
    other = tmp_path / "other"
    other.mkdir()
    know_stack_of(other)
    url = "http://127.0.0.1:4999/api"
    assert access_to(url).auth_string != "rlhf:other"
    (other / STACK_ENV).write_text(f"PREFECT_API_URL='{url}'\nPREFECT_API_AUTH_STRING='rlhf:other'\n")
    assert access_to(url).auth_string == "rlhf:other"


def test_of_several_stacks_that_had_an_address_the_one_named_last_has_it(home: Path, tmp_path: Path) -> None:
    url = "http://127.0.0.1:4998/api"
    for name in ("first", "last", "first"):
        other = tmp_path / name
        other.mkdir(exist_ok=True)
        (other / STACK_ENV).write_text(f"PREFECT_API_URL='{url}'\nPREFECT_API_AUTH_STRING='rlhf:{name}'\n")
        know_stack_of(other)
        assert access_to(url).auth_string == f"rlhf:{name}", home


@pytest.fixture
def secured(tmp_path: Path, servers: tuple[Server, Server]) -> tuple[Server, Path]:
    """A server behind a certificate that nobody else has signed, and the file with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "prefect")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path, key_path = tmp_path / "certificate.pem", tmp_path / "key.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    forms = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_path.write_bytes(key.private_bytes(*forms))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key_path)
    servers[0].socket = context.wrap_socket(servers[0].socket, server_side=True)
    return servers[0], path


def test_an_https_server_is_known_by_its_certificate_or_believed_if_the_user_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, secured: tuple[Server, Path]
) -> None:
    assert home.is_dir()
    server, certificate = secured
    url = server.url("https", "localhost")
    with pytest.raises(ServiceError, match=r"does not answer .*certificate verify failed"):
        prefect_api.call(url, "GET", "/admin/version")
    assert server.asked == []
    monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(certificate))
    assert prefect_api.call(url, "GET", "/admin/version") is True
    monkeypatch.delenv("PREFECT_API_SSL_CERT_FILE")
    monkeypatch.setenv("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "true")
    assert prefect_api.is_healthy(url)


def test_certificates_that_are_none_are_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (home / "nowhere.pem", home / STACK_ENV):
        monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(path))
        with pytest.raises(ServiceError, match=rf"PREFECT_API_SSL_CERT_FILE is {path}, which holds no certificates"):
            prefect_api.call("https://prefect.example/api", "GET", "/admin/version")


@pytest.mark.usefixtures("home")
def test_headers_that_are_none_are_told_without_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("hunter2", json.dumps(["hunter2"]), json.dumps({"X": {"hunter2": 1}})):
        monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", value)
        with pytest.raises(SettingsError, match="PREFECT_CLIENT_CUSTOM_HEADERS is not what it must be") as caught:
            settings()
        assert "hunter2" not in str(caught.value)


@pytest.mark.usefixtures("home")
def test_the_password_goes_to_no_child_that_does_not_ask_prefect_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rlhf:local" not in settings().child_environment().values()
    assert "rlhf:local" not in repr(settings())
    monkeypatch.setenv("RLHF_S3_CREDENTIALS_BLOCK", "keys")
    assert settings().child_environment()["PREFECT_API_AUTH_STRING"] == "rlhf:local"
