"""How this installation reaches other people's data; needs no Prefect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infra.settings import Settings
    from rlhf_core.data.reading import Access


def access_to(known: Settings) -> Access:
    """Return where fetched data are kept, and how the S3 server of the settings is reached."""
    from rlhf_core.data.reading import Access

    options: dict[str, Any] = {
        "endpoint_url": known.s3_endpoint_url,
        "key": known.s3_access_key,
        "secret": known.s3_secret_key.get_secret_value() if known.s3_secret_key else None,
        "client_kwargs": {"region_name": known.s3_region} if known.s3_region else None,
        # bucket.localhost has no address
        "config_kwargs": {"s3": {"addressing_style": "path"}} if known.s3_endpoint_url else None,
    }
    return Access(known.home / "data", {name: value for name, value in options.items() if value is not None})
