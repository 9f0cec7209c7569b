"""The compose file, as Docker would read it: variables put in, services by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infra.settings import CHECKOUT
from infra.strict_yaml import load_yaml

COMPOSE = CHECKOUT / "infra" / "deploy" / "compose"
FILE = COMPOSE / "compose.yaml"
EXAMPLE = COMPOSE / "settings.example.env"
SECRETS = {"POSTGRES_PASSWORD": "of the database", "PREFECT_API_AUTH_STRING": "rlhf:a", "RLHF_S3_SECRET_KEY": "of S3"}
_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<colon>:?)(?P<sign>[-?])(?P<word>[^}]*))?\})")


def compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the file with these variables in it, and no others.

    Raises:
        KeyError: if it demands one that is not there.
    """

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        known = variables.get(match["name"])
        if known or (known is not None and not match["colon"]):
            return known
        if match["sign"] == "-":
            return match["word"]
        raise KeyError(match["name"])

    def put_in(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: put_in(each) for key, each in node.items()}
        if isinstance(node, list):
            return [put_in(each) for each in node]
        return _VARIABLE.sub(value, node) if isinstance(node, str) else node

    document = put_in(load_yaml(FILE))
    assert isinstance(document, dict)
    return document


def services(variables: Mapping[str, str] = SECRETS) -> dict[str, dict[str, Any]]:
    """Return the services by name."""
    found: dict[str, dict[str, Any]] = compose(variables)["services"]
    return found
