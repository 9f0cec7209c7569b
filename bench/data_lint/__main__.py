"""What the linter finds of faults that are planted in HH-RLHF's rows, and whom it accuses of rows that are clean.

python -m bench.data_lint [--seed 0] [--kinds echo cut ...] [--soup PATH]

Rows come from RLHF_DATA_DIR. A line says, of a kind of fault in a share of the rows: how many of the planted faults the
rule finds (recall), how many rows it newly accuses beside them, and how many of the accused rows are planted
(precision). Two kinds are judged per set. The last line is on rows that a reader judged before any rule was run:
`judged.txt` has the first 16 digits of each row's SHA-256 (chosen, a zero byte, rejected) and the verdict.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.data_lint.plants import (
    KINDS,
    PER_SET,
    Row,
    asked,
    equal_cut,
    has_asked,
    in_place,
    is_plain,
    reworded,
    with_asked,
)
from flows.presets import resolve
from infra.settings import settings
from rlhf_core.config import SourceConfig
from rlhf_core.config.lint import LintConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.data.jsonl import to_jsonl
from rlhf_core.data.linting import LintRow, LintSet, lint_set, lint_sets
from rlhf_core.data.preparing import TokenMeter
from rlhf_core.data.reading import Access, read_set
from rlhf_core.models.loading import load_tokenizer, locate_model

SHARES = (0.01, 0.05, 0.2)
SETS = 20
"""Sets of which a rule that judges sets is asked."""
JUDGED = 500
HH = "hh-rlhf/harmless-base-test.jsonl.gz"


class Bench:
    """HH-RLHF's rows, and a linter that reads them from files as a user's."""

    def __init__(self, seed: int, directory: Path, soup: str | None) -> None:
        config = resolve("quickstart")
        tokenizer = load_tokenizer(locate_model(config.model.path, models_dir=settings().models_dir))
        self.config, self.seed, self.directory, self.soup = config, seed, directory, soup
        self.meter = TokenMeter(PromptTemplate(tokenizer, config.template))
        self.limit = config.reward_model.max_length
        self._known: dict[str, set[int]] = {}
        self.path = (settings().data_dir or Path()) / HH
        self.hh = read_set(
            [SourceConfig(path=str(self.path))], "preferences", access=Access(directory), bad_rows="drop"
        )
        self.rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in self.hh.rows]

    def accused(self, rows: list[Row], rule: str) -> set[int]:
        """Return the places that a rule accuses of rows, written and read as a file."""
        given = self._read(rows, "planted")
        found = lint_set(given, LintConfig.model_validate({"default": "off", rule: "warn"}))
        return {int(where.split()[1]) - 1 for each in found for where in each.named}

    def _read(self, rows: list[Row], name: str) -> LintSet:
        path = self.directory / f"{name}.jsonl"
        path.write_bytes(to_jsonl(rows))
        read = read_set([SourceConfig(path=str(path))], "preferences", access=Access(self.directory), bad_rows="drop")
        return LintSet.of("preferences", read, self.meter, self.limit)

    def of_rows(self, kind: str, share: float) -> Row:
        """Return the line of a kind that is planted in rows."""
        rule, plant, suits = KINDS[kind]
        rng = random.Random(f"{self.seed} {kind} {share}")
        planted = plant(self.rows, share, rng, suits)
        started = time.process_time()
        found, before = self.accused(planted.rows, rule), self.before(rule)
        seconds = time.process_time() - started
        line = counts(kind, rule, share, planted.places, found, before)
        return line | {"cpu_s": round(seconds, 1)} | self._soup(kind)

    def before(self, rule: str) -> set[int]:
        """Return the places that a rule accuses of the rows as they are."""
        if rule not in self._known:
            self._known[rule] = self.accused(self.rows, rule)
        return self._known[rule]

    def equal_cut(self, share: float) -> Row:
        """Return the line on responses that are equal as far as the stage reads."""
        change = partial(equal_cut, limit=self.limit)
        planted = in_place(change)(self.rows, share, random.Random(f"{self.seed} cut {share}"), is_plain)
        found = self.accused(planted.rows, "equal")
        return counts("equal after truncation", "equal", share, planted.places, found, self.before("equal"))

    def overlap(self, share: float) -> Row:
        """Return the line on prompts that nearly are those of an evaluation set: a third of the rows."""
        rng = random.Random(f"{self.seed} overlap {share}")
        rows = rng.sample(self.rows, len(self.rows))
        held_out, learnt = rows[: len(rows) // 3], rows[len(rows) // 3 :]
        copied = rng.sample([row for row in held_out if has_asked(row)], round(share * len(learnt)))
        copies = [with_asked(row, reworded(asked(row), rng)) for row in copied]
        before = self._overlaps(learnt, held_out)
        found = self._overlaps([*learnt, *copies], held_out)
        places = [[len(learnt) + place] for place, _ in enumerate(copies)]
        return counts("overlap", "overlap", share, places, found, before)

    def _overlaps(self, learnt: list[Row], held_out: list[Row]) -> set[int]:
        sets = {}
        for role, rows in (("preferences", learnt), ("evaluation", held_out)):
            path = self.directory / f"{role}.jsonl"
            path.write_bytes(to_jsonl(rows))
            source = [SourceConfig(path=str(path))]
            sets[role] = read_set(source, "preferences", access=Access(self.directory), bad_rows="drop")
        lint = LintConfig.model_validate({"default": "off", "overlap": "warn"})
        config = self.config.model_copy(update={"data": self.config.data.model_copy(update={"lint": lint})})
        found = lint_sets(sets, config, is_held_out=lambda role, _: role == "evaluation").findings
        return {int(where.split()[1]) - 1 for each in found for where in each.named}

    def of_sets(self, kind: str, share: float) -> Row:
        """Return the line of a kind that is planted in sets."""
        rule, plant, says = PER_SET[kind]
        lint = LintConfig.model_validate({"default": "off", rule: "warn"})
        told = Counter[bool]()
        for number in range(SETS):
            for planted in (True, False):
                rng = random.Random(f"{self.seed} {kind} {share} {number}")
                rows = plant(self.rows, share if planted else 0.0, rng)
                given = [
                    LintRow("", row["prompt"], (row["chosen"], row["rejected"]), None, row.get("by")) for row in rows
                ]
                found = lint_set(LintSet("preferences", tuple(given)), lint)
                told[planted] += any(says in each.says for each in found)
        return {
            "bench": "data_lint", "kind": kind, "rule": rule, "share": share, "sets": SETS,
            "recall": told[True] / SETS, "clean_sets_accused": told[False],
        }  # fmt: skip

    def _soup(self, kind: str) -> Row:
        """Return what `soup data lint` says of the same file, of the kinds that it looks for."""
        looks_for = {"equal": "identical_pairs", "near-duplicate": "near_duplicates", "leaked prompt": "prompt_leak"}
        if self.soup is None or kind not in looks_for:
            return {}
        path, report = self.directory / "planted.jsonl", self.directory / "soup.json"
        command = [
            self.soup,
            "data",
            "lint",
            str(path),
            "--format",
            "dpo",
            "--sample",
            "50000",
            "--output",
            str(report),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if not report.is_file():
            return {"soup": f"no report, exit status {ran.returncode}"}
        checks = json.loads(report.read_text())["checks"]
        return {"soup": next((each for each in checks if each.get("name") == looks_for[kind]), checks)}

    def judged(self) -> Row:
        """Return the line on the rows that a reader judged, by all rules that accuse rows."""
        text = (Path(__file__).parent / "judged.txt").read_text()
        verdicts = dict(line.split() for line in text.splitlines())
        given = LintSet.of("preferences", self.hh, self.meter, self.limit)
        by_row: dict[str, list[str]] = {}
        for each in lint_set(given, LintConfig()):
            for where in each.named:
                by_row.setdefault(where.split()[1], []).append(each.rule)
        with gzip.open(self.path) as lines:
            rows = {digest(json.loads(line)): str(number) for number, line in enumerate(lines, start=1)}
        clean = [rows[name] for name, verdict in verdicts.items() if verdict == "clean"][:JUDGED]
        faulty = [rows[name] for name, verdict in verdicts.items() if verdict not in {"clean", "blank"}]
        accused = [number for number in clean if number in by_row]
        return {
            "bench": "data_lint",
            "kind": "judged rows",
            "clean": len(clean),
            "clean_accused": len(accused),
            "clean_accused_share": len(accused) / len(clean),
            "by_rules": Counter(rule for number in accused for rule in by_row[number]),
            "faulty": len(faulty),
            "faulty_accused": sum(number in by_row for number in faulty),
        }


def digest(row: Row) -> str:
    """Return what names a row in the file of verdicts."""
    return hashlib.sha256(f"{row['chosen']}\0{row['rejected']}".encode()).hexdigest()[:16]


def counts(
    kind: str, rule: str, share: float, places: Sequence[Sequence[int]], found: set[int], before: set[int]
) -> Row:
    """Return the line of a kind: a fault is found where one of its rows is accused."""
    theirs = {place for group in places for place in group}
    hits = sum(any(place in found for place in group) for group in places)
    others = found - theirs - before
    accused = found & theirs
    return {
        "bench": "data_lint", "kind": kind, "rule": rule, "share": share, "planted": len(places),
        "recall": round(hits / len(places), 4), "precision": round(len(accused) / max(1, len(accused | others)), 4),
        "newly_accused_beside": len(others), "accused_without": len(before),
    }  # fmt: skip


def lines(bench: Bench, kinds: Sequence[str]) -> Iterator[Row]:
    """Yield the lines of the kinds that are asked for, or of all."""
    every: dict[str, Callable[[float], Row]] = {
        "equal after truncation": bench.equal_cut,
        **{kind: partial(bench.of_rows, kind) for kind in KINDS},
        "overlap": bench.overlap,
        **{kind: partial(bench.of_sets, kind) for kind in PER_SET},
    }
    for kind in kinds or every:
        for share in SHARES:
            yield every[kind](share)
    if not kinds:
        yield bench.judged()


def main() -> int:
    """Print a line for each kind and share."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=())
    parser.add_argument("--soup", help="the command of soup-cli, which looks at the same files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for line in lines(Bench(given.seed, Path(directory), given.soup), given.kinds):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
