"""Which versions are kept: the newest of each name, and all that an alias or a lease reaches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import KINDS, did_you_mean
from infra.errors import StoreError

NEVER = "run"
"""Reports are small, and what a team looks back to: they are never retired."""
ALL = "all"
_DEFAULT = {"ppo-state": 2}
_EXAMPLE = "ppo-state=3,policy=50"


@dataclass(frozen=True, slots=True)
class Retention:
    """How many of the newest versions of each name are kept, by kind; of a kind that is not named, all."""

    newest: Mapping[str, int] = field(default_factory=lambda: dict(_DEFAULT))

    @classmethod
    def parse(cls, text: str | None) -> Retention:
        """Read a rule as people write it.

        Args:
            text: `kind=count` with commas between them; `kind=all` keeps all of a kind. What is not named stays
                as it is by default: two training states, and all of the others.

        Raises:
            StoreError: if it cannot be read, or would retire what is never retired.

        Example:
            >>> Retention.parse("policy=50").newest
            {'ppo-state': 2, 'policy': 50}
        """
        newest = dict(_DEFAULT)
        for part in (text or "").split(","):
            kind, _, count = (word.strip() for word in part.partition("="))
            if not part.strip():
                continue
            if kind not in KINDS:
                raise StoreError(
                    f"the retention {text!r} names the kind {kind!r}, which there is not{did_you_mean(kind, KINDS)}; "
                    f"write kind=count, such as {_EXAMPLE}; the kinds are {', '.join(KINDS)}"
                )
            if count == ALL:
                newest.pop(kind, None)
                continue
            if kind == NEVER:
                raise StoreError(f"the retention {text!r} would retire reports; those of kind {NEVER!r} are all kept")
            if not (count.isdecimal() and int(count) > 0):
                raise StoreError(
                    f"the retention {text!r} keeps {count!r} of {kind}; expected a number from 1 on, or {ALL!r}, "
                    f"such as {_EXAMPLE}"
                )
            newest[kind] = int(count)
        return cls(newest)

    def retired(self, manifests: Iterable[Manifest], kept: Collection[str]) -> list[Manifest]:
        """Return the versions that are no longer wanted.

        Args:
            manifests: of all versions.
            kept: references of those that stay however old they are.
        """
        ordered = sorted(manifests, key=lambda each: (each.kind, each.name, each.version))
        found: list[Manifest] = []
        for (kind, _), versions in groupby(ordered, key=lambda each: (each.kind, each.name)):
            if kind in self.newest:
                found += [each for each in list(versions)[: -self.newest[kind]] if each.uri not in kept]
        return found

    def __str__(self) -> str:
        return ", ".join(f"{kind}={count}" for kind, count in self.newest.items()) or "nothing is retired"


def reached(roots: Iterable[str], manifests: Iterable[Manifest]) -> set[str]:
    """Return the references of some versions and of all that they came from.

    Args:
        roots: references of versions, there or not.
        manifests: of all versions.
    """
    parents = {manifest.uri: [parent.uri for parent in manifest.parents] for manifest in manifests}
    found: set[str] = set()
    pending = list(roots)
    while pending:
        uri = pending.pop()
        if uri not in found:
            found.add(uri)
            pending += parents.get(uri, ())
    return found
