"""The manifest's form as a JSON schema, for readers in other languages: `python -m infra.artifacts.schema`."""

from __future__ import annotations

import json
import sys
from typing import Any

from infra.artifacts.manifest import SCHEMA_VERSION, Manifest

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def manifest_schema() -> dict[str, Any]:
    """Return the JSON schema of the manifests that this release reads.

    Fields that it does not know are allowed: a later minor version may have them.
    """
    schema = Manifest.model_json_schema(mode="validation")
    return {"$schema": DIALECT, "title": f"rlhf-flows manifest, version {SCHEMA_VERSION}"} | {
        name: value for name, value in schema.items() if name != "title"
    }


def schema_text() -> str:
    """Return the schema as docs/manifest.schema.json holds it."""
    return json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
