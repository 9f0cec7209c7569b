"""Where the S3 server is, and who we are to it. Nothing of this is ever shown, stored or passed to Prefect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infra.errors import SettingsError, StoreError, StoreNotReadyError

if TYPE_CHECKING:
    from infra.settings import Settings


@dataclass(frozen=True, slots=True)
class S3Options:
    """Where the S3 server is and who we are; None takes botocore's own defaults, an instance's role among them."""

    endpoint_url: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    region: str | None = None
    session_token: str | None = field(default=None, repr=False)
    """Of temporary keys."""
    profile: str | None = None
    """A profile of `~/.aws`, in place of keys."""
    single_writer: bool = False
    """The user's promise that nobody else writes: the server need not enforce conditions then."""

    def __post_init__(self) -> None:
        """Refuse a key without its other: botocore would ignore both and take whatever else it finds."""
        if bool(self.access_key) != bool(self.secret_key):
            have, lack = ("an access key", "secret key") if self.access_key else ("a secret key", "access key")
            raise SettingsError(
                f"{have} for the S3 server is set, and no {lack}; set RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY, or "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or none of them"
            )
        if self.session_token and not self.access_key:
            raise SettingsError(
                "a session token for the S3 server is set, and no keys are; set RLHF_S3_ACCESS_KEY and "
                "RLHF_S3_SECRET_KEY beside it, or unset RLHF_S3_SESSION_TOKEN and AWS_SESSION_TOKEN"
            )

    def arguments(self) -> dict[str, Any]:
        """Return what `s3fs.S3FileSystem` wants to know of it."""
        given = {
            "endpoint_url": self.endpoint_url,
            "key": self.access_key,
            "secret": self.secret_key,
            "token": self.session_token,
            "profile": self.profile,
            "client_kwargs": {"region_name": self.region} if self.region else None,
            # bucket.localhost has no address
            "config_kwargs": {"s3": {"addressing_style": "path"}} if self.endpoint_url else None,
        }
        return {name: value for name, value in given.items() if value is not None}


def options_of(known: Settings) -> S3Options:
    """Return how the settings reach the S3 server.

    Raises:
        SettingsError: if several sources of credentials are named, or half a pair of keys.
        StoreError: if the Prefect block that is named cannot be read, or holds no keys.
    """
    sources = {
        "RLHF_S3_ACCESS_KEY": known.s3_access_key,
        "RLHF_S3_PROFILE": known.s3_profile,
        "RLHF_S3_CREDENTIALS_BLOCK": known.s3_credentials_block,
    }
    named = [variable for variable, value in sources.items() if value]
    if len(named) > 1:
        raise SettingsError(
            f"{' and '.join(named)} are set, each of which says who we are to the S3 server; unset all but one"
        )
    keys: dict[str, str | None] = {}
    if known.s3_credentials_block:
        keys = _keys_of_block(known.s3_credentials_block)
    elif not known.s3_profile:
        keys = {
            "access_key": known.s3_access_key,
            "secret_key": known.s3_secret_key.get_secret_value() if known.s3_secret_key else None,
            "session_token": known.s3_session_token.get_secret_value() if known.s3_session_token else None,
        }
    return S3Options(
        endpoint_url=known.s3_endpoint_url,
        region=known.s3_region,
        profile=known.s3_profile,
        single_writer=known.store_single_writer,
        **keys,
    )


def _keys_of_block(name: str) -> dict[str, str | None]:
    """Return the keys that a Secret block of Prefect holds; errors say nothing of its content."""
    from httpx import HTTPError, TransportError  # noqa: PLC0415 - Prefect takes a second to import, and few keep their keys there
    from prefect.blocks.system import Secret  # noqa: PLC0415
    from prefect.exceptions import PrefectException  # noqa: PLC0415

    what = f"the Prefect block secret/{name} (RLHF_S3_CREDENTIALS_BLOCK)"
    try:
        content = Secret.load(name, _sync=True).get()  # type: ignore[call-arg,union-attr]
    except ValueError:
        raise StoreError(f"there is no {what.removeprefix('the ')}; save it, or name another") from None
    except TransportError as error:
        raise StoreNotReadyError(f"{what} cannot be read: {type(error).__name__}; check PREFECT_API_URL") from None
    except (HTTPError, PrefectException, RuntimeError, OSError) as error:
        raise StoreError(f"{what} cannot be read: {type(error).__name__}; check PREFECT_API_URL") from None
    fields = ("access_key", "secret_key", "session_token")
    if not isinstance(content, dict) or not all(
        content.get(each) and isinstance(content[each], str) for each in fields[:2]
    ):
        raise StoreError(
            f'{what} holds no keys; expected JSON: {{"access_key": ..., "secret_key": ...}} and, of temporary keys, '
            '"session_token"'
        )
    return {each: content.get(each) for each in fields}
