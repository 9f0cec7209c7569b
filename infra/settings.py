"""The settings of this installation: the one module that reads environment variables.

Earlier sources win over later ones: the environment, `.env` in the checkout (the user's lines), `stack.env` in the home
directory (written by `rlhf up`, mode 0600, with the credentials of the local store and the local Prefect server), the
`AWS_*` variables.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from dotenv import dotenv_values
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from infra import loopback
from infra.errors import SettingsError

CHECKOUT = Path(__file__).resolve().parents[1]
"""The root of the working tree: where prefect.yaml and `.env` lie."""

STACK_ENV = "stack.env"
_KEY_FIELDS = ("s3_access_key", "s3_secret_key", "s3_session_token")
_S3_FIELDS = ("s3_endpoint_url", *_KEY_FIELDS, "s3_region")
_OTHER_KEYS = ("s3_profile", "s3_credentials_block")
_CHOICES = ("store_url", "s3_endpoint_url")
_ALIASED = ("prefect_api_url", "prefect_api_auth_string")
_SECRET = ("PREFECT_CLIENT_CUSTOM_HEADERS", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "RLHF_S3_SECRET_KEY")
_SECRETS_NAME = re.compile(
    r"(?!(OLD)?PWD$).*(KEY|SECRET|TOKEN|PASSWORD|PASSWD|PASS|PWD|AUTH|AUTH_STRING|CREDENTIALS)$", re.IGNORECASE
)
_PASSWORD_OF_URL = re.compile(r"://[^/:@\s]*:([^/@\s]+)@")
_SHORTEST_SECRET = 8
"""Characters: a shorter one would be found in words that are none."""
_AWS_NAMES = {
    "s3_endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "s3_access_key": ("AWS_ACCESS_KEY_ID",),
    "s3_secret_key": ("AWS_SECRET_ACCESS_KEY",),
    "s3_session_token": ("AWS_SESSION_TOKEN",),
    "s3_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}


class Settings(BaseSettings):
    """Where things are, as the environment and the checkout say."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="RLHF_",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    home: Path = CHECKOUT / ".rlhf"
    """All state but sockets: databases, store, caches, logs."""
    store_url: str = "s3://rlhf"
    """The artifact store: `s3://bucket/prefix` or `file:///directory`."""
    s3_endpoint_url: str | None = None
    """The S3 server; None is Amazon's own."""
    s3_access_key: str | None = Field(None, repr=False)
    s3_secret_key: SecretStr | None = None
    s3_session_token: SecretStr | None = None
    """Belongs to temporary keys."""
    s3_profile: str | None = None
    """A profile of `~/.aws`, in place of keys."""
    s3_credentials_block: str | None = None
    """A Secret block of Prefect, in place of keys: JSON with access_key, secret_key and perhaps session_token."""
    s3_region: str | None = None
    store_single_writer: bool = False
    """Your promise that one process at a time writes to the store: for servers without conditional writes."""
    cache_limit_gb: float = Field(50.0, ge=0, allow_inf_nan=False)
    """How much the local cache of fetched artifacts keeps, in GB of 1e9 bytes; what is in use stays besides."""
    store_patience_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """How long a run waits for an artifact store that is away, in seconds, before it is left to be started again."""
    retention: str | None = None
    """What is kept, by kind: `ppo-state=3,policy=50`; None: two training states of a run until its policy is stored,
    and all of the others."""
    s3_port: int | None = Field(None, ge=1024, le=65535)
    """Port of the local SeaweedFS; None takes 8333 or, where that is occupied, a free one."""
    prefect_port: int | None = Field(None, ge=1024, le=65535)
    """Port of the local Prefect server; None takes 4200 or, where that is occupied, a free one."""
    prefect_api_url: str | None = Field(None, validation_alias="PREFECT_API_URL")
    """The Prefect server's address; `rlhf up` writes it to `.env`."""
    prefect_api_auth_string: SecretStr | None = Field(None, validation_alias="PREFECT_API_AUTH_STRING")
    """What that server asks for, as user:password; `rlhf up` draws one for its own, and writes it to `.env`."""
    prefect_api_key: SecretStr | None = Field(None, validation_alias="PREFECT_API_KEY")
    """What it asks for instead, on Prefect Cloud."""
    prefect_api_ssl_cert_file: Path | None = Field(None, validation_alias="PREFECT_API_SSL_CERT_FILE")
    """Certificates by which an https server of your own is known; None: the system's."""
    prefect_api_tls_insecure_skip_verify: bool = Field(False, validation_alias="PREFECT_API_TLS_INSECURE_SKIP_VERIFY")
    """Whether an https server is taken for what it says it is."""
    prefect_client_custom_headers: Annotated[dict[str, SecretStr], NoDecode] = Field(
        default_factory=dict, validation_alias="PREFECT_CLIENT_CUSTOM_HEADERS"
    )
    """Further headers for a server of your own, such as its gateway asks for: a JSON object."""
    prefect_server_api_auth_string: SecretStr | None = Field(None, validation_alias="PREFECT_SERVER_API_AUTH_STRING")
    """A password of your own for the local Prefect server, as user:password; None: `rlhf up` draws one."""
    database: Literal["sqlite", "postgres"] = "sqlite"
    """The local Prefect server's database: a file, or a PostgreSQL of the stack's own; both in the home directory."""
    database_url: str | None = Field(None, repr=False)
    """A database of your own for it (`postgresql+asyncpg://...`), in place of these."""
    ray_address: str | None = None
    """A Ray cluster of your own (host:port) for runs that name none in `ppo.cluster.address`; None starts one each."""
    server_patience_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """How long a run waits for a Prefect server that is away; None: sixteen minutes. Commands that one types do not."""
    stage_timeout_s: float = Field(86_400.0, gt=0, le=1e9)
    """Longest time for one attempt of a stage, such as SFT or an evaluation; then the run has failed."""
    flow_timeout_s: float = Field(604_800.0, gt=0, le=1e9)
    """Longest time for a whole flow; then the run has failed."""
    runs_kept_days: float = Field(90.0, ge=1, le=36_500)
    """How long the local Prefect server keeps a run that has ended, with its log, page and pictures. Its report stays
    in the artifact store."""
    batches_kept_days: float = Field(30.0, ge=1, le=36_500)
    """How long a batch that PPO could not learn from stays in `failed-batches` of the home directory."""
    log_limit_mb: float = Field(20.0, ge=0.1, allow_inf_nan=False)
    """Size in MB of 1e6 bytes at which a service's log begins anew; its end is kept beside it once."""
    data_dir: Path | None = None
    """Where tests find real data."""
    reward_modules: Annotated[tuple[str, ...], NoDecode] = ()
    """Modules and packages, with commas between them, from which reward functions may be taken by path."""
    trackers: Annotated[tuple[str, ...], NoDecode] = ()
    """Where runs are shown besides Prefect: `mlflow`, `tensorboard`, `trackio`, `wandb`, with spaces or commas between
    them. What is computed and stored does not depend on it."""

    @field_validator("reward_modules", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value

    @field_validator("trackers", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return tuple(dict.fromkeys(value.lower().replace(",", " ").split())) if isinstance(value, str) else value

    @field_validator("prefect_client_custom_headers", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        try:
            headers = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError('expected a JSON object, such as {"X-Name": "value"}') from None
        try:
            for name, said in headers.items() if isinstance(headers, dict) else ():
                name.encode("ascii"), str(said).encode("latin-1")
        except UnicodeEncodeError:
            raise ValueError("expected ASCII in names of headers, and Latin-1 in what they say") from None
        return headers

    @model_validator(mode="before")
    @classmethod
    def _password_of_that_server(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Keep a server's password, which a file holds, from another server whose address was exported."""
        home = Path(values.get("home") or cls.model_fields["home"].default).expanduser()
        if is_of_another_server(values.get("PREFECT_API_AUTH_STRING"), values.get("PREFECT_API_URL"), home):
            return {name: value for name, value in values.items() if name != "PREFECT_API_AUTH_STRING"}
        return values

    @field_validator("home", "data_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value.expanduser().absolute() if value is not None else None

    @property
    def cache_dir(self) -> Path:
        """Fetched artifacts, and manifests that were read."""
        return self.home / "cache"

    @property
    def models_dir(self) -> Path:
        """Converted models."""
        return self.home / "models"

    @property
    def clusters_dir(self) -> Path:
        """Records and logs of Ray clusters."""
        return self.home / "clusters"

    @property
    def logs_dir(self) -> Path:
        """Logs of set-up and services."""
        return self.home / "logs"

    @property
    def wants_local_store(self) -> bool:
        """Whether the user has left the choice of the store to `rlhf up`."""
        chosen = {**read_env_file(env_file()), **os.environ}
        written = read_env_file(self.home / STACK_ENV)  # children of the stack hold these as variables
        names = [f"RLHF_{name.upper()}" for name in _CHOICES]
        return all(chosen.get(name) in (None, "", written.get(name)) for name in names)

    @property
    def wants_local_postgres(self) -> bool:
        """Whether the Prefect server's database is a PostgreSQL of the stack's own."""
        return self.database == "postgres" and self.database_url is None

    def child_environment(self) -> dict[str, str]:
        """Return the variables with which a child process, here or on a Ray cluster, finds what this one finds."""
        known = {
            "RLHF_HOME": str(self.home),
            "RLHF_STORE_URL": self.store_url,
            "RLHF_S3_ENDPOINT_URL": self.s3_endpoint_url,
            "RLHF_S3_ACCESS_KEY": self.s3_access_key,
            "RLHF_S3_SECRET_KEY": self.s3_secret_key.get_secret_value() if self.s3_secret_key else None,
            "RLHF_S3_SESSION_TOKEN": self.s3_session_token.get_secret_value() if self.s3_session_token else None,
            "RLHF_S3_PROFILE": self.s3_profile,
            "RLHF_S3_CREDENTIALS_BLOCK": self.s3_credentials_block,
            "RLHF_S3_REGION": self.s3_region,
            "RLHF_STORE_SINGLE_WRITER": "true" if self.store_single_writer else None,
            "RLHF_CACHE_LIMIT_GB": str(self.cache_limit_gb),
            "RLHF_STORE_PATIENCE_S": str(self.store_patience_s),
            "RLHF_RETENTION": self.retention,
            "RLHF_REWARD_MODULES": ",".join(self.reward_modules) or None,
            "RLHF_SERVER_PATIENCE_S": f"{self.server_patience_s:g}" if self.server_patience_s else None,
            "PREFECT_API_URL": self.prefect_api_url,
            **(self._prefect_variables() if self.s3_credentials_block else {}),
        }
        return {name: value for name, value in known.items() if value is not None}

    def _prefect_variables(self) -> dict[str, str | None]:
        """Return what a child needs that reads the store's keys from the Prefect server, and no other child."""
        headers = {name: value.get_secret_value() for name, value in self.prefect_client_custom_headers.items()}
        secrets = {
            "PREFECT_API_AUTH_STRING": self.prefect_api_auth_string,
            "PREFECT_API_KEY": self.prefect_api_key,
        }
        return {
            **{name: value.get_secret_value() if value else None for name, value in secrets.items()},
            "PREFECT_API_SSL_CERT_FILE": str(self.prefect_api_ssl_cert_file or "") or None,
            "PREFECT_API_TLS_INSECURE_SKIP_VERIFY": "true" if self.prefect_api_tls_insecure_skip_verify else None,
            "PREFECT_CLIENT_CUSTOM_HEADERS": json.dumps(headers) if headers else None,
        }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the stack's file and the AWS variables after the user's own words."""
        del file_secret_settings
        return (
            init_settings,
            env_settings,
            dotenv_settings,
            _StackFile(settings_cls),
            _AwsVariables(settings_cls),
        )


class _AllAtOnce(PydanticBaseSettingsSource):
    """A source whose `__call__` answers for all fields together."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Return nothing for a field alone: pydantic-settings wants the method, and never calls it here."""
        del field
        return None, field_name, False


class _StackFile(_AllAtOnce):
    """What `rlhf up` wrote: the local store's address and secret, for a store that the user did not choose."""

    def __call__(self) -> dict[str, Any]:
        home = Path(self.current_state.get("home") or Settings.model_fields["home"].default)
        values = read_env_file(home.expanduser() / STACK_ENV)
        fields = {name.removeprefix("RLHF_").lower(): value for name, value in values.items()}
        fields |= {name.upper(): fields.pop(name) for name in _ALIASED if name in fields}
        if any(self.current_state.get(name) not in (None, fields.get(name)) for name in _CHOICES):
            for name in ("store_url", *_S3_FIELDS):
                fields.pop(name, None)  # a store other than the local one: the local keys are useless there
        if any(self.current_state.get(name) for name in _OTHER_KEYS):
            for name in _KEY_FIELDS:
                fields.pop(name, None)  # the user names other credentials
        return fields


class _AwsVariables(_AllAtOnce):
    """The usual variables of S3 clients, for what nothing else has set."""

    def __call__(self) -> dict[str, Any]:
        if any(self.current_state.get(name) for name in _KEY_FIELDS):
            return {}  # a key of one source must not meet an endpoint or secret of another
        found: dict[str, Any] = {}
        for field, names in _AWS_NAMES.items():
            value = next((os.environ[name] for name in names if os.environ.get(name)), None)
            if value is not None:
                found[field] = value
        if any(self.current_state.get(name) for name in _OTHER_KEYS):
            return {field: value for field, value in found.items() if field not in _KEY_FIELDS}
        if "s3_access_key" not in found and os.environ.get("AWS_PROFILE"):  # botocore's order: keys, then the profile
            found["s3_profile"] = os.environ["AWS_PROFILE"]
        return found


class _Known(NamedTuple):
    """Settings, and all that they were read from."""

    settings: Settings
    environment: dict[str, str]
    files: list[bytes | int | None]
    """What each holds, or why it cannot be read."""


_known: _Known | None = None


def settings() -> Settings:
    """Return the settings as they are now: they are read anew when the environment or a file has changed.

    Raises:
        SettingsError: if a variable holds what it must not.
    """
    global _known  # noqa: PLW0603 - a run asks again and again, and pydantic-settings takes 5 ms for an answer
    home = _known.settings.home if _known else Settings.model_fields["home"].default
    environment, files = dict(os.environ), [_bytes(env_file()), _bytes(home / STACK_ENV)]  # before they are read
    if _known and (_known.environment, _known.files) == (environment, files):
        return _known.settings
    found = _read()
    _known = _Known(found, environment, files if found.home == home else [])  # else the next call reads that home's
    return found


def _bytes(path: Path) -> bytes | int | None:
    try:
        return path.read_bytes()
    except OSError as error:
        return error.errno


def _read() -> Settings:
    try:
        return Settings(_env_file=env_file(), _env_file_encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:  # read_env_file has its own sentence
        raise _unreadable(env_file(), error) from None
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        variable = name if name.isupper() else f"RLHF_{name.upper()}"
        came = "not what it must be" if variable in _SECRET else repr(first["input"])
        raise SettingsError(
            f"{variable} is {came}: {first['msg'].lower()}; correct it in the environment or in .env"
        ) from None


def env_file() -> Path:
    """Return the file that Prefect's own command reads in the checkout; `RLHF_ENV_FILE` moves it (tests)."""
    return Path(os.environ.get("RLHF_ENV_FILE") or CHECKOUT / ".env")


def read_env_file(path: Path) -> dict[str, str]:
    """Return the assignments of an env file; none when it is not there.

    Raises:
        SettingsError: if it cannot be read.
    """
    try:
        found = dotenv_values(path, interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    return {name: value for name, value in found.items() if value is not None}


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> SettingsError:
    return SettingsError(f"{path} cannot be read ({why(error)}); correct it, or move it away")


def why(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file of text cannot be read, for people."""
    return str(error.strerror) if isinstance(error, OSError) else f"byte {error.start + 1} is no UTF-8"


def same_server(url: str | None, other: str | None) -> bool:
    """Whether two addresses, whatever their paths, seem to be of one server."""
    return bool(url and other) and _server(str(url)) == _server(str(other))


def is_of_another_server(password: str | None, url: str | None, home: Path) -> bool:
    """Whether a password was written beside the addresses of other servers, and not beside this one's.

    Args:
        password: user:password.
        url: of the server that would be told it.
        home: of a stack; what `rlhf up` wrote there is read, and the checkout's `.env`, which may be another stack's.
    """
    files = [read_env_file(path) for path in (home / STACK_ENV, env_file())]
    beside = [each.get("PREFECT_API_URL") for each in files if password == each.get("PREFECT_API_AUTH_STRING")]
    known = [each for each in beside if each] if password else []
    return bool(known) and not any(same_server(url, each) for each in known)


def _server(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # no address at all
        return (url, None, None)
    return (
        parts.scheme,
        loopback.ADDRESS if host in loopback.HOSTS else host,
        port or {"http": 80, "https": 443}.get(parts.scheme),
    )


def secrets() -> set[str]:
    """Return what no log may show.

    That is secret settings, the values of variables that are secret by their names, their single lines, and the
    passwords in addresses.
    """
    known = settings()
    found = {value for name, value in os.environ.items() if _SECRETS_NAME.match(name)}
    values = [getattr(known, name) for name in Settings.model_fields]
    values += known.prefect_client_custom_headers.values()
    found |= {each.get_secret_value() for each in values if isinstance(each, SecretStr)}
    found |= {each.rpartition(":")[2] for each in found}  # of user:password
    found |= {line for each in found for line in each.splitlines()}  # a log is read line by line
    texts = [*os.environ.values(), *(each for each in values if isinstance(each, str))]
    coded = {password for text in texts for password in _PASSWORD_OF_URL.findall(text)}
    found |= coded | {unquote(each) for each in coded}
    return {each for each in found if len(each) >= _SHORTEST_SECRET}


def without_secrets(text: str, known: Collection[str]) -> str:
    """Return a text with stars for secrets.

    Args:
        text: for others.
        known: of `secrets`.
    """
    for each in sorted(known, key=len, reverse=True):  # one may be part of another
        text = text.replace(each, "***")
    return text


def inherited_environment(*, without_prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a copy of this process's environment for a child, without variables of these prefixes, in any case."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(without_prefixes)}
