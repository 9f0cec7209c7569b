"""Who we are to a Prefect server: credentials by its address, so that no server is told another's password."""

from __future__ import annotations

import ssl
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from infra import loopback
from infra.errors import ServiceError
from infra.settings import (
    STACK_ENV,
    env_file,
    inherited_environment,
    is_of_another_server,
    read_env_file,
    same_server,
    settings,
)

PASSWORD_FILE = "prefect.password"
_FURTHER_HOMES: dict[Path, None] = {}
"""In the order in which they were named."""


class Access(NamedTuple):
    """What a server is told, and how it is recognised."""

    auth_string: str | None
    """user:password."""
    api_key: str | None
    """In place of it; not used where there is one."""
    headers: dict[str, str]
    """Further ones that the user has set for a server of their own."""
    cert_file: Path | None
    """Certificates by which an https server is recognised; None: the system's."""
    skip_verify: bool
    """Whether the server's certificate is not checked."""
    source: str | None
    """Where the password or key was set, for people; None without one."""

    @property
    def all_headers(self) -> dict[str, str]:
        """Return the headers that say who we are, as Prefect's own client sends them; the user's own override them."""
        if self.auth_string:
            said = {"Authorization": f"Basic {b64encode(self.auth_string.encode()).decode()}"}
        else:
            said = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**said, **{name.capitalize(): value for name, value in self.headers.items()}}

    def tls(self) -> ssl.SSLContext:
        """Return how an https server is recognised.

        Raises:
            ServiceError: if there are no certificates where they should be.
        """
        if self.skip_verify:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            return ssl.create_default_context(cafile=self.cert_file)
        except OSError as error:  # ssl's own errors are such
            raise ServiceError(
                f"PREFECT_API_SSL_CERT_FILE is {self.cert_file}, which holds no certificates "
                f"({error.strerror or error}); correct it"
            ) from None


class OwnServer(NamedTuple):
    """The server of a local stack, by an address that somebody gave."""

    home: Path
    """Of the stack."""
    url: str
    """The address, without `localhost`: by that name it could be another user's."""
    port: int
    users: tuple[int, int]
    """Who may listen there: root, and whose file holds the password."""

    def look(self) -> None:
        """Check who listens there, before anything is sent.

        Raises:
            ConnectionRefusedError: if it is neither of these users.
        """
        loopback.expect(self.users, self.port)


def know_stack_of(home: Path) -> None:
    """Make calls to the server of this home's stack carry its password, in a process whose settings name another.

    Args:
        home: of a stack that is there or will be; what `rlhf up` writes in it is read at each call.
    """
    _FURTHER_HOMES.pop(home, None)
    _FURTHER_HOMES[home] = None


def access_to(api_url: str) -> Access:
    """Return who we are to a server: to a local stack's its own password, to any other what the user has set.

    Args:
        api_url: the server's.

    Raises:
        SettingsError: if a variable holds what it must not.
    """
    if own := own_server(api_url):
        password = read_env_file(own.home / STACK_ENV).get("PREFECT_API_AUTH_STRING")
        return Access(password, None, {}, None, False, str(own.home / PASSWORD_FILE) if password else None)
    known = settings()
    auth_string, key = known.prefect_api_auth_string, known.prefect_api_key
    if auth_string and is_of_another_server(auth_string.get_secret_value(), api_url, known.home):
        auth_string = None
    return Access(
        auth_string.get_secret_value() if auth_string else None,
        key.get_secret_value() if key else None,
        {name: value.get_secret_value() for name, value in known.prefect_client_custom_headers.items()},
        known.prefect_api_ssl_cert_file,
        known.prefect_api_tls_insecure_skip_verify,
        origin("PREFECT_API_AUTH_STRING") if auth_string else origin("PREFECT_API_KEY") if key else None,
    )


def own_server(api_url: str) -> OwnServer | None:
    """Return the local stack's server that has this address, of our own home or of others the one named last."""
    for home in (settings().home, *reversed(_FURTHER_HOMES)):
        path = home / STACK_ENV
        if same_server(api_url, read_env_file(path).get("PREFECT_API_URL")):
            parts = urlsplit(api_url)
            port = parts.port or 80
            url = parts._replace(netloc=f"{loopback.ADDRESS}:{port}").geturl()
            return OwnServer(home, url, port, (0, path.stat().st_uid))
    return None


def origin(variable: str) -> str:
    """Return a variable that is set and where it has its value from, for people."""
    if inherited_environment().get(variable):
        return f"{variable} as it is exported"
    if variable in read_env_file(env_file()):
        return f"{variable} in {env_file()}"
    return f"{variable} of Prefect's profile"


def refusal(api_url: str, access: Access) -> str:
    """Return what to tell a person when a server answers 401, and what to do."""
    own = own_server(api_url)
    line = f"the line in {own.home / PASSWORD_FILE}" if own else "its user:password"
    if access.source is None:
        key = "" if own else ", or PREFECT_API_KEY"
        return f"the Prefect server at {api_url} asks for a password; set PREFECT_API_AUTH_STRING to {line}{key}"
    if access.source.startswith("PREFECT_API_KEY"):
        return f"the Prefect server at {api_url} does not take {access.source}; correct it"
    if access.source.startswith("PREFECT_"):
        return f"the Prefect server at {api_url} does not take {access.source}; unset it, or set it to {line}"
    return (
        f"the Prefect server at {api_url} does not take the password in {access.source}: it is another stack's, or was "
        "started with another password; run `rlhf up`, which brings both together"
    )
