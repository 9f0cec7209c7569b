"""How this installation reaches other people's data; needs no Prefect."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.settings import Settings
    from rlhf_core.data.reading import Access


def access_to(known: Settings) -> Access:
    """Return where fetched data are kept, and how the S3 server of the settings is reached: as the store's is.

    Whoever reads none of `s3://` needs no credentials: what is wrong with them is said where one is read.
    """
    from infra.artifacts.credentials import options_of
    from rlhf_core.data.reading import Access

    return Access(known.home / "data", lambda: options_of(known).arguments())
