"""Trackers of experiments that runs are shown in besides Prefect: which were chosen, and where each one is."""

from __future__ import annotations

import os
from difflib import get_close_matches
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

from infra.errors import SettingsError
from infra.loopback import open_url
from infra.settings import Settings

MODULES = {"mlflow": "mlflow", "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}
"""By tracker, the package that writes to it. All but TensorBoard's are extras of this project, of the same name."""
_ANSWER_S = 5.0
_WANDB = "https://api.wandb.ai"


def chosen(settings: Settings) -> tuple[str, ...]:
    """Return the trackers of RLHF_TRACKERS.

    Raises:
        SettingsError: if one is not known, or its package is not installed.
    """
    for name in settings.trackers:
        if name not in MODULES:
            near = get_close_matches(name, MODULES, n=1)
            meant = f"; did you mean {near[0]}?" if near else "; correct it"
            raise SettingsError(f"RLHF_TRACKERS names {name!r}, and known are {', '.join(MODULES)}{meant}")
        if find_spec(MODULES[name]) is None:
            raise SettingsError(
                f"RLHF_TRACKERS names {name}, and its package is not installed; install it (.venv/bin/python -m pip "
                f"install -e '.[{name}]'), or leave {name} out"
            )
    return settings.trackers


def directory_of(settings: Settings) -> Path:
    """Return where trackers keep what they write on this machine."""
    return settings.home / "trackers"


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables of a process that writes to trackers: the user's, else ours for a tracker on this machine.

    Ours say, too, that a server that is away is given up soon, and that nobody's use of a package is reported.
    """
    home = directory_of(settings)
    ours = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "TRACKIO_DIR": str(home / "trackio"),
        "WANDB_DIR": str(home),
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
    }
    return {**ours, **os.environ}


def place_of(name: str, settings: Settings) -> str:
    """Return where a tracker is: its server's address without a password, or a path.

    Args:
        name: of the tracker.
        settings: of this installation.
    """
    known, home = environment(settings), directory_of(settings)
    if name == "mlflow":
        place = known["MLFLOW_TRACKING_URI"]
    elif name == "trackio":
        place = known.get("TRACKIO_SPACE_ID") or known.get("TRACKIO_SERVER_URL") or known["TRACKIO_DIR"]
    elif name == "wandb":
        offline = known.get("WANDB_MODE") in {"offline", "dryrun"}
        place = f"{known['WANDB_DIR']}/wandb" if offline else known.get("WANDB_BASE_URL", _WANDB)
    else:
        place = str(home / name)
    if not urlsplit(place).hostname:
        return place
    return urlsplit(place)._replace(netloc=urlsplit(place).netloc.rpartition("@")[2], query="").geturl()


def fault_of(name: str, settings: Settings) -> str | None:
    """Return in a few words why a tracker cannot be written to; None if it seems that it can.

    Args:
        name: of a chosen tracker.
        settings: of this installation.
    """
    place = place_of(name, settings)
    if urlsplit(place).scheme not in {"http", "https"}:
        nearest = next(each for each in (directory_of(settings), *directory_of(settings).parents) if each.exists())
        return None if os.access(nearest, os.W_OK) else f"{nearest} cannot be written to"
    try:
        open_url(place, timeout_s=_ANSWER_S).close()
    except HTTPError:
        return None  # it answers; whether it knows us is seen when something is written
    except (OSError, HTTPException, ValueError) as error:
        return f"{place} does not answer ({getattr(error, 'reason', None) or error})"
    return None
