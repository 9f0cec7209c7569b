"""Nights over data that arrive: each row is learnt once, by a night that ended; bad files and few rows stop nothing."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.begin import with_data_and_project
from flows.cli import main
from flows.presets import preset_values, resolve
from infra.artifacts import ArtifactStore
from rlhf_core.config import DataConfig, PipelineConfig
from rlhf_core.data import problems_from_jsonl
from rlhf_core.data.arriving import Ledger, RowMarks
from rlhf_core.errors import ConfigError, DataError, TooFewRowsError
from tasks import arrivals as arrivals_tasks
from tasks.arrivals import LEARNT, LEDGER, MARKS, NothingNew, NothingNewError, look_for_arrivals, moment
from tasks.context import Context
from tasks.data import prepare_data, with_data
from tasks.progress import telling
from tasks.results import StageResult
from tests.unit.tasks.data_files import SMALL

READS = ("ppo", "evaluation")
HOUR = 3600.0


class Nights:
    """A folder that grows, and the nights that look into it."""

    def __init__(self, store: ArtifactStore, model: Path, folder: Path, **arrivals: Any) -> None:
        folder.mkdir()
        self.store, self.folder, self.model = store, folder, model
        self.arrivals = {"settle_s": 0, **arrivals}
        self.places = 40

    def overrides(self) -> dict[str, Any]:
        return SMALL | {
            "data.splits": {"sft": 0, "preferences": 0, "ppo": self.places, "evaluation": 8},
            "data.task": None,
            "data.task_parameters": None,
            "data.demonstrations": None,
            "data.prompts": str(self.folder),
            "data.arrivals": self.arrivals,
            "ppo.reward": {"verifier": 0.0, "reward_model": 1.0},
            "evaluation.judge": "reward_model",
            "data.verifier": None,
        }

    def config(self, **changes: Any) -> PipelineConfig:
        return resolve("quickstart", model=str(self.model), overrides=self.overrides() | changes)

    def arrive(self, name: str, numbers: Any, *, raw: str = "", age_s: float = HOUR) -> Path:
        """Put a file there, written some time ago."""
        rows = "".join(json.dumps({"prompt": f"Tell me of {n}."}) + "\n" for n in numbers)
        path = self.folder / name
        path.write_text(raw or rows)
        then = time.time() - age_s
        os.utime(path, (then, then))
        return path

    def prepare(self, *, reads: tuple[str, ...] = READS, **changes: Any) -> Any:
        return prepare_data.fn(self.config(**changes), None, reads=reads)  # type: ignore[attr-defined]

    def night(self, *, reads: tuple[str, ...] = READS, **changes: Any) -> Any:
        """Prepare a night, and let it end well."""
        made = self.prepare(reads=reads, **changes)
        if isinstance(made, StageResult):
            self.end_well(made)
        return made

    def end_well(self, made: StageResult) -> None:
        arrivals_tasks._count_as_learnt.fn(made)  # type: ignore[attr-defined]

    def rows(self, made: StageResult, split: str) -> list[int]:
        body = self.store.read_bytes(self.store.resolve(made.uri), f"{split}.jsonl")
        return sorted(int(row.prompt.split()[-1].rstrip(".")) for row in problems_from_jsonl(body))

    def ledger(self, made: StageResult) -> Ledger:
        return Ledger.model_validate(self.store.read_json(self.store.resolve(made.uri), LEDGER))


@pytest.fixture
def nights(store: ArtifactStore, model: Path, tmp_path: Path) -> Nights:
    return Nights(store, model, tmp_path / "arriving")


def grow(draw: random.Random, nights: Nights, night: int) -> set[int]:
    """Change the folder as teams do: new files, rows appended, the same rows in another order, files that roll away."""
    first = 1000 * night
    numbers = set(range(first, first + draw.randint(30, 60)))
    nights.arrive(f"day-{night}.jsonl", sorted(numbers))
    files = sorted(nights.folder.glob("day-*.jsonl"))
    for path in files[:-1]:
        lines = path.read_text().splitlines(keepends=True)
        change = draw.choice(["stay", "shuffle", "append", "roll", "rename"])
        if change == "shuffle":
            draw.shuffle(lines)
            path.write_text("".join(lines))
        elif change == "append":
            more = set(range(first + 500, first + 500 + draw.randint(1, 9)))
            numbers |= more
            path.write_text("".join(lines) + "".join(json.dumps({"prompt": f"TELL me  of {n}."}) + "\n" for n in more))
        elif change == "roll":
            path.unlink()
        elif change == "rename":
            path.rename(path.with_name(f"day-0{path.name[4:]}"))
    return numbers


@pytest.mark.parametrize("seed", range(2))
def test_each_row_is_learnt_once_by_a_night_that_ended_and_held_out_ones_never(nights: Nights, seed: int) -> None:
    draw, nights.places = random.Random(seed), 16
    arrived: set[int] = set()
    learnt: Counter[int] = Counter()
    held: set[int] = set()
    for night in range(1, 5):
        arrived |= grow(draw, nights, night)
        if draw.random() < 0.4:
            assert isinstance(nights.prepare(), StageResult), "a night that fails after its dataset was stored"
        made = nights.night()
        learnt.update(nights.rows(made, "ppo"))
        held.update(nights.rows(made, "evaluation"))
    for _ in range(20):  # what had no place in a night's splits has one in a later night
        made = nights.night()
        if isinstance(made, NothingNew):
            break
        learnt.update(nights.rows(made, "ppo"))
        held.update(nights.rows(made, "evaluation"))
    assert isinstance(made, NothingNew)
    waiting = nights.ledger(_latest(nights)).waiting
    assert set(learnt.values()) == {1}
    assert learnt.keys().isdisjoint(held)
    assert len(arrived) - len(learnt) - waiting == pytest.approx(0.25 * len(arrived), abs=0.12 * len(arrived))
    assert waiting < 8, "less than an episode needs"


def _latest(nights: Nights) -> Any:
    return nights.store.resolve(f"dataset/quickstart@{LEARNT}")


def test_nothing_new_ends_a_night_with_a_sentence_that_names_the_last(nights: Nights, context: Context) -> None:
    with pytest.raises(NothingNewError, match="nothing has arrived yet"):
        look_for_arrivals(context, nights.config(), None)
    nights.arrive("a.jsonl", range(20))
    look_for_arrivals(context, nights.config(), None)
    made = nights.night()
    assert made.metrics["waiting_rows"] == 0
    with pytest.raises(NothingNewError, match=f"nothing new since .* UTC .*{made.uri}") as caught:
        look_for_arrivals(context, nights.config(), None)
    assert caught.value.found.figures["new_files"] == 0
    nights.arrive("b.jsonl", reversed(range(20)))
    look_for_arrivals(context, nights.config(), None)
    found = nights.night()
    assert "1 new file with 20 rows, which earlier nights had" in found.told
    assert found.figures == {"new_files": 1, "bad_files": 0, "new_rows": 0, "known_rows": 20}


def test_a_night_that_has_nothing_to_learn_stores_that_as_its_report(nights: Nights, context: Context) -> None:
    with pytest.raises(NothingNewError) as caught:
        look_for_arrivals(context, nights.config(), None)
    uri = arrivals_tasks.write_nothing_new.fn(caught.value.config, caught.value.found)  # type: ignore[attr-defined]
    report = nights.store.resolve(uri)
    assert report.metrics["nothing_new"] is True
    assert report.metrics["night"] == f"{datetime.now():%Y-%m-%d}"
    assert b"nothing has arrived yet" in nights.store.read_bytes(report, "report.md")


def test_what_a_failed_night_took_in_is_new_to_the_next(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(20))
    failed = nights.prepare()
    again = nights.night()
    assert (again.uri, again.reused) == (failed.uri, True)
    nights.arrive("b.jsonl", range(100, 120))
    failed = nights.prepare()
    nights.arrive("c.jsonl", range(200, 220))
    both = nights.night()
    assert both.metrics["new_rows"] == 40
    assert not set(nights.rows(both, "ppo")) & set(nights.rows(again, "ppo"))
    assert nights.ledger(both).before == again.uri


def test_two_nights_that_meet_do_not_count_both(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(20))
    first = nights.prepare()
    nights.arrive("b.jsonl", range(100, 120))
    second = nights.prepare()
    said: list[str] = []
    nights.end_well(second)
    with telling(said.append):
        nights.end_well(first)
    assert nights.store.alias("dataset", "quickstart", LEARNT) == second.uri
    assert f"{second.uri} was learnt meanwhile" in said[-1]


def test_a_night_that_a_person_takes_back_is_learnt_by_the_next(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(20))
    first = nights.night()
    nights.arrive("b.jsonl", range(100, 120))
    second = nights.night()
    nights.store.rollback("dataset", "quickstart", LEARNT, why="poisoned", who="a person")
    assert nights.store.alias("dataset", "quickstart", LEARNT) == first.uri
    again = nights.night()
    assert (again.uri, again.metrics["new_rows"]) == (second.uri, 20)
    assert nights.store.alias("dataset", "quickstart", LEARNT) == second.uri


def test_a_bad_file_is_left_out_with_its_reason_until_it_changes(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(20))
    bad = nights.arrive("b.jsonl", (), raw='{"prompt": "whole"}\n{"prompt": ')
    said: list[str] = []
    with telling(said.append):
        made = nights.night()
    assert (made.metrics["new_files"], made.metrics["bad_files"], made.metrics["new_rows"]) == (2, 1, 20)
    reason = next(each.fault for each in nights.ledger(made).files if each.fault)
    assert reason is not None
    assert "row 2 of" in reason
    assert any(f"quarantine is 1 file: row 2 of {bad}" in line for line in said)
    report = nights.store.read_bytes(nights.store.resolve(made.uri), "report.md").decode()
    assert "of them in quarantine" in report
    assert bad.read_text() == '{"prompt": "whole"}\n{"prompt": ', "nothing of the user's is changed"
    nights.arrive("c.jsonl", range(100, 120))
    assert nights.night().metrics["bad_files"] == 0, "it is known"
    nights.arrive("b.jsonl", range(300, 320))
    assert nights.night().metrics["new_rows"] == 20


def test_more_bad_files_than_allowed_stop_the_night_and_name_the_largest(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(20))
    nights.arrive("b.jsonl", (), raw="PK\x03\x04 and more of it")
    nights.arrive("c.jsonl", (), raw="no rows")
    with pytest.raises(
        DataError, match=r"2 of 3 new files .*max_bad_files = 0\.5 allows; the largest: .*b\.jsonl is a zip"
    ):
        nights.prepare()
    nights.arrivals["max_bad_files"] = 1.0
    assert nights.night().metrics["bad_files"] == 2


def test_a_file_that_is_young_or_changes_while_it_is_read_waits(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.arrivals["settle_s"] = 60
    nights.arrive("a.jsonl", range(20))
    nights.arrive("b.jsonl", range(100, 120), age_s=1)
    made = nights.night()
    assert (made.metrics["new_files"], made.metrics["new_rows"]) == (1, 20)
    nights.arrivals["settle_s"] = 0
    from rlhf_core.data.arriving import reading

    as_ever = reading.read_part

    def slow(part: Any, *others: Any) -> None:
        as_ever(part, *others)
        nights.arrive("b.jsonl", range(100, 130), age_s=0.5)

    with monkeypatch.context() as patched:
        patched.setattr(reading, "read_part", slow)
        assert "may still be written to" in nights.night().told
    assert nights.night().metrics["new_rows"] == 30


def test_too_few_rows_wait_for_more(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(4))
    assert "which wait for more" in nights.night().told
    nights.arrive("b.jsonl", range(100, 116))
    made = nights.night()
    assert made.metrics["new_rows"] == 20
    nights.arrivals["min_rows"] = 500
    nights.arrive("c.jsonl", range(200, 220))
    assert "fewer than data.arrivals.min_rows = 500" in nights.night().told
    nights.arrivals["min_rows"] = 1
    assert nights.night().metrics["new_rows"] == 20


def test_a_window_learns_the_last_nights_again_and_new_rows_first(nights: Nights) -> None:
    made = []
    for night in range(4):
        nights.arrive(f"{night}.jsonl", range(1000 * night, 1000 * night + 16))
        made.append(nights.night(**{"data.arrivals": {"settle_s": 0, "window_nights": 2}, "data.splits.ppo": 1000}))
    learnt = [set(nights.rows(each, "ppo")) for each in made]
    for night in (2, 3):
        own = {n for n in learnt[night] if n // 1000 == night}
        assert learnt[night] - own == {n for n in learnt[night - 1] if n // 1000 == night - 1}
        assert own
    nights.arrive("4.jsonl", range(4000, 4016))
    crowded = {"data.arrivals": {"settle_s": 0, "window_nights": 9}, "data.splits.ppo": 12}
    found = Counter(n // 1000 for n in nights.rows(nights.night(**crowded), "ppo"))
    assert found[4] >= 8, "they have the places before what was learnt already"


def test_replay_adds_its_share_of_old_rows_and_other_ones_each_night(nights: Nights) -> None:
    wide = {"data.splits.ppo": 1000}
    for night in range(3):
        nights.arrive(f"{night}.jsonl", range(1000 * night, 1000 * night + 60))
        before = nights.night(**wide)
    old = set()
    for night in (3, 4):
        nights.arrive(f"{night}.jsonl", range(1000 * night, 1000 * night + 40))
        made = nights.night(**wide, **{"data.arrivals": {"settle_s": 0, "replay": 0.5}})
        rows = nights.rows(made, "ppo")
        replayed = {n for n in rows if n < 1000 * night}
        assert len(replayed) == len(rows) - len(replayed) == made.metrics["old_rows"]
        assert replayed != old
        old = replayed
    assert set(nights.rows(before, "ppo")) & old, "of any night"


def test_a_day_takes_what_had_arrived_by_its_end(nights: Nights) -> None:
    day = 24 * HOUR
    nights.arrive("old.jsonl", range(20), age_s=3 * day)
    nights.arrive("new.jsonl", range(100, 120), age_s=0.1 * HOUR)
    then = f"{datetime.now() - timedelta(days=2):%Y-%m-%d}"
    made = prepare_data.fn(nights.config(), None, reads=READS, as_of=then)  # type: ignore[attr-defined]
    assert made.metrics["new_rows"] == 20
    nights.end_well(made)
    assert nights.night().metrics["new_rows"] == 20


@pytest.mark.parametrize("given", ["yesterday", "2026-13-01", "2999-01-01"])
def test_a_day_that_is_none_or_to_come_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="as_of"):
        moment(given)
    assert moment(f"{datetime.now():%Y-%m-%d}") <= datetime.now(UTC)


def test_a_day_needs_data_that_arrive(nights: Nights, context: Context) -> None:
    with pytest.raises(ConfigError, match="as_of is for data that arrive"):
        look_for_arrivals(context, nights.config(**{"data.arrivals": None}), "2026-11-01")


def test_the_parameter_data_has_the_role_of_its_first_good_file_and_keeps_it_when_all_rolled_away(
    nights: Nights,
) -> None:
    config = nights.config(**{"data.prompts": None, "data.task": "gcd"})
    assert with_data(config, str(nights.folder)).data.prompts, "nothing has arrived"
    bad, good = (
        nights.arrive("a.jsonl", (), raw="{"),
        nights.arrive("b.jsonl", (), raw='{"question": "1?", "answer": 1}'),
    )
    assert [each.path for each in with_data(config, str(nights.folder)).data.problems] == [str(nights.folder)]
    for path in (bad, good):
        path.unlink()
    nights.arrive("c.jsonl", range(20))
    nights.night()
    (nights.folder / "c.jsonl").unlink()
    assert with_data(config, str(nights.folder)).data.prompts


def test_a_row_that_is_too_long_stops_no_night(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(20))
    nights.arrive("b.jsonl", (), raw=json.dumps({"prompt": "long " * 4000}))
    made = nights.night()
    assert made.metrics["too_long"] == 1
    nights.arrive("c.jsonl", range(100, 120))
    assert nights.night().metrics["too_long"] == 0


def test_a_folder_that_is_empty_now_has_the_role_that_it_had_in_its_own_project(nights: Nights) -> None:
    folder, values = str(nights.folder), preset_values("quickstart")
    draft = nights.config(**{"data.prompts": None, "data.task": "gcd"})
    nights.arrive("a.jsonl", (), raw=worked(range(100)))
    config = with_data_and_project(draft, folder, values, {})
    assert config.name.startswith("quickstart-arriving-")
    nights.end_well(prepare_data.fn(config, None, reads=READS))  # type: ignore[attr-defined]
    (nights.folder / "a.jsonl").unlink()
    nights.places = 8
    other = nights.folder.with_name("others")
    nights.folder = other
    other.mkdir()
    nights.arrive("b.jsonl", range(40))
    assert isinstance(nights.night(), StageResult), "of a project that is called as the preset"
    assert with_data_and_project(draft, folder, values, {}) == config
    named = with_data_and_project(draft, folder, values, {"name": "team"})
    assert named.data.prompts, "a project of another name has had nothing"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"heldout_fraction": 0}, r"evaluation may have 0 \(needs 2\); raise data.heldout_fraction"),
        ({"evaluation": "one.jsonl"}, r"data.evaluation .*has 1 different prompts.* evaluation may have 1 \(needs 2\)"),
        ({"splits": {"sft": 0, "preferences": 0, "ppo": 4, "evaluation": 8}}, "data.splits.ppo has only 4 problems"),
    ],
    ids=["nothing is held out", "a set that does not grow", "sizes that exclude each other"],
)
def test_what_no_number_of_rows_would_help_is_refused(
    nights: Nights, data: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nights.folder.parent)
    Path("one.jsonl").write_text(json.dumps({"prompt": "Tell me more."}) + "\n")
    nights.arrive("a.jsonl", range(30))
    config = nights.config()
    changed = config.model_copy(update={"data": DataConfig.model_validate(config.data.model_dump() | data)})
    with pytest.raises(DataError, match=f"{told}.*to wait for more rows does not help") as caught:
        prepare_data.fn(changed, None, reads=READS)  # type: ignore[attr-defined]
    assert not isinstance(caught.value, TooFewRowsError)


PROBLEMS = {
    "data.prompts": None,
    "data.verifier": "exact",
    "ppo.reward": {"verifier": 1.0},
    "evaluation.judge": "verifier",
    "data.splits": {"sft": 40, "preferences": 0, "ppo": 40, "evaluation": 8},
}


def worked(numbers: Any) -> str:
    """Return problems whose answers can be learnt, as GSM8K writes them."""
    rows = ({"question": f"Tell me of {n}.", "answer": f"It is said.\n#### {n}"} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_of_a_stage_that_a_night_does_not_train_wait_for_one_that_does(nights: Nights) -> None:
    problems = {**PROBLEMS, "data.problems": str(nights.folder)}
    nights.arrive("a.jsonl", (), raw=worked(range(60)))
    said: list[str] = []
    with telling(said.append):
        without = nights.night(reads=READS, **problems)
    ours, others = nights.rows(without, "ppo"), nights.rows(without, "sft")
    assert ours
    assert others
    assert without.metrics["learnt_rows"] == len(ours)
    assert without.metrics["waiting_rows"] == len(others)
    assert any(f"has {len(others)} rows for SFT, which wait for a night that does" in line for line in said)
    ended = nights.night(reads=READS, **problems)
    assert f"nothing to learn tonight: what this run does not train has {len(others)} rows for SFT" in ended.told
    full = nights.prepare(reads=("sft", *READS), **problems)
    assert isinstance(full, NothingNew), "PPO has nothing, and is to be trained"
    nights.arrive("b.jsonl", (), raw=worked(range(100, 130)))
    with telling(said.append):
        full = nights.night(reads=("sft", *READS), **problems)
    assert any(f"{len(others)} rows that waited" in line for line in said)
    assert set(others) < set(nights.rows(full, "sft"))
    assert not set(ours) & {*nights.rows(full, "sft"), *nights.rows(full, "ppo")}
    assert full.metrics["waiting_rows"] == 0


def test_a_corrected_answer_takes_the_place_of_the_one_that_waits_or_is_held_out(nights: Nights) -> None:
    problems = {**PROBLEMS, "data.problems": str(nights.folder)}
    nights.arrive("a.jsonl", (), raw=worked(range(60)))
    first = nights.night(reads=READS, **problems)
    waiting, held = nights.rows(first, "sft")[0], nights.rows(first, "evaluation")[0]
    nights.arrive("b.jsonl", (), raw=worked([waiting, held]).replace("####", "#### 7") + worked(range(100, 140)))
    second = nights.night(reads=("sft", *READS), **problems)
    for number, split in ((waiting, "sft"), (held, "evaluation")):
        rows = problems_from_jsonl(_read(nights, second, f"{split}.jsonl").encode())
        assert [row.answer for row in rows if row.prompt == f"Tell me of {number}."] == [f"7 {number}"]


def test_rows_for_a_reward_model_wait_though_they_cannot_be_ranked(nights: Nights) -> None:
    shown = [json.dumps({"prompt": f"Tell me of {n}.", "response": "It is said."}) + "\n" for n in range(160)]
    nights.arrive("a.jsonl", (), raw="".join(shown[:80]))
    splits = {"sft": 40, "preferences": 40, "ppo": 40, "evaluation": 8}
    sets = {"data.prompts": None, "data.demonstrations": str(nights.folder), "data.splits": splits}
    said: list[str] = []
    with telling(said.append):
        made = nights.night(reads=("sft", *READS), **sets)
    told = next(int(found[1]) for line in said if (found := re.search(r"has (\d+) rows? for the reward model", line)))
    pending = problems_from_jsonl(_read(nights, made, "arrivals/pending-demonstrations.jsonl").encode())
    assert told > 0
    assert made.metrics["waiting_rows"] >= told
    assert made.metrics["learnt_rows"] + len(pending) == 80, "no row is lost"
    nights.arrive("b.jsonl", (), raw="".join(shown[80:]))
    without = sets | {"data.splits": splits | {"preferences": 0, "sft": 80}}
    learnt = nights.rows(nights.night(reads=("sft", *READS), **without), "sft")
    assert len([number for number in learnt if number < 80]) >= told, "they serve a night that has no such stage"


def test_a_night_that_trains_more_makes_a_dataset_of_its_own(nights: Nights) -> None:
    problems = {**PROBLEMS, "data.problems": str(nights.folder)}
    nights.arrive("a.jsonl", (), raw=worked(range(60)))
    without = nights.prepare(reads=READS, **problems)
    full = nights.night(reads=("sft", *READS), **problems)
    assert full.uri != without.uri, "else what it learns would count as waiting"
    assert full.metrics["waiting_rows"] == 0


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"Tell me of {number}.", "chosen": f"It is {number}.", "rejected": "I do not know."}


def test_pairs_wait_for_a_night_that_trains_a_reward_model(nights: Nights) -> None:
    pairs = nights.folder.with_name("pairs.jsonl")
    pairs.write_text("".join(json.dumps(pair(n)) + "\n" for n in range(1000, 1020)))
    os.utime(pairs, (time.time() - HOUR,) * 2)
    both = {"data.preferences": str(pairs)}
    nights.arrive("a.jsonl", range(20))
    without = nights.night(**both)
    waiting = without.metrics["waiting_rows"]
    assert waiting > 10
    nights.arrive("b.jsonl", range(100, 120))
    assert nights.night(**both).metrics["waiting_rows"] == waiting
    nights.arrive("c.jsonl", range(200, 220))
    with_pairs = nights.night(reads=("preferences", *READS), **both)
    assert nights.ledger(with_pairs).learnt["preferences"] == 12, "reward_model.pairs"
    assert with_pairs.metrics["waiting_rows"] == waiting - 12


def test_what_waits_is_kept_while_the_configuration_does_not_name_its_role(nights: Nights) -> None:
    pairs = nights.folder.with_name("pairs.jsonl")
    pairs.write_text("".join(json.dumps(pair(n)) + "\n" for n in range(1000, 1020)))
    os.utime(pairs, (time.time() - HOUR,) * 2)
    both, full = {"data.preferences": str(pairs)}, ("preferences", *READS)
    nights.arrive("a.jsonl", range(20))
    waiting = nights.night(**both).metrics["waiting_rows"]
    nights.arrive("b.jsonl", range(100, 120))
    said: list[str] = []
    with telling(said.append):
        alone = nights.night()
    assert alone.metrics["waiting_rows"] == waiting
    assert "kept for a night whose configuration names them again: 20 of data.preferences" in said[-1]
    assert "arrivals/pending-preferences.jsonl" in {each.path for each in nights.store.resolve(alone.uri).files}
    nights.arrive("c.jsonl", range(200, 220))
    again = nights.night(reads=full, **both)
    assert nights.ledger(again).learnt["preferences"] == 12


def test_an_evaluation_alone_needs_nothing_new(nights: Nights, context: Context) -> None:
    nights.arrive("a.jsonl", range(20))
    nights.night()
    look_for_arrivals(context, nights.config(), None, learns=False)
    found = nights.prepare(reads=("evaluation",))
    assert nights.rows(found, "evaluation")
    assert (found.metrics["learnt_rows"], found.metrics["of_night"]) == (0, False)


def test_an_evaluation_without_problems_fails_with_what_is_missing(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(1))
    with pytest.raises(TooFewRowsError, match="evaluation"):
        nights.prepare(reads=("evaluation",))


def stories(numbers: Any, *, end: str) -> str:
    """Return prompts of many words, of which another end changes one."""
    words = [
        f"{first}{second}" for first in ("amber", "birch", "cedar", "elder") for second in ("wood", "leaf", "seed")
    ]
    rows = []
    for n in numbers:
        draw = random.Random(n)
        rows.append({"prompt": f"Tell me of {' '.join(draw.choices(words, k=16))} {end} {n}."})
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(("rows", "found"), [(20_000, True), (5, False), (0, False)])
def test_what_nearly_repeats_a_row_of_an_earlier_night_is_found_among_the_last_rows(
    nights: Nights, rows: int, found: bool
) -> None:
    nights.arrivals["compared_rows"] = rows
    nights.arrive("a.jsonl", (), raw=stories(range(20), end="today"))
    first = nights.night()
    learnt = nights.rows(first, "ppo")
    assert len(learnt) > 8
    nights.arrive("b.jsonl", (), raw=stories(range(100, 120), end="today"))
    second = nights.night()
    nights.arrive("c.jsonl", (), raw=stories(learnt[:6], end="now") + stories(range(200, 220), end="today"))
    third = nights.night(**{"data.lint": {"repeated": "drop"}})
    dropped = [json.loads(line) for line in _read(nights, third, "rejected.jsonl").splitlines()]
    assert len(dropped) == (6 if found else 0)
    assert all(f"of {first.uri}" in each["detail"] for each in dropped), "it says where"
    assert not set(learnt[:6]) & set(nights.rows(third, "ppo")) or not found
    assert nights.rows(second, "ppo")


def test_what_a_window_learns_again_repeats_nothing(nights: Nights) -> None:
    window = {"data.arrivals": {"settle_s": 0, "window_nights": 3, "compared_rows": 0}, "data.splits.ppo": 1000}
    nights.arrive("a.jsonl", (), raw=stories(range(20), end="today"))
    learnt = nights.rows(nights.night(**window), "ppo")
    nights.arrive("b.jsonl", (), raw=stories(learnt[:6], end="now") + stories(range(200, 220), end="today"))
    second = nights.night(**window, **{"data.lint": {"repeated": "drop"}})
    assert set(learnt) <= set(nights.rows(second, "ppo")), "the new rows repeat the old ones"
    assert second.metrics["rejected"] == 6


def test_what_waits_is_judged_once_and_what_is_dropped_does_not_come_back(nights: Nights) -> None:
    drops, refuses = {"data.lint": {"repeated": "drop"}}, {"data.lint": {"repeated": "refuse"}}
    nights.arrive("a.jsonl", (), raw=stories(range(20), end="today"))
    first = nights.night()
    learnt, held = nights.rows(first, "ppo"), nights.rows(first, "evaluation")
    again = stories([*learnt, *held], end="now")
    nights.arrive("b.jsonl", (), raw=again + stories(range(200, 220), end="today"))
    second = nights.night(**drops)
    assert second.metrics["rejected"] == len(learnt) + len(held)
    assert not [row for row in _pending(nights, second) if " now " in row], "dropped, though held out"
    nights.arrive("c.jsonl", (), raw=again.replace("now", "later") + stories(range(300, 320), end="today"))
    third = nights.night()  # warns only, so that they are accepted
    assert [row for row in _pending(nights, third) if " later " in row]
    nights.arrive("d.jsonl", (), raw=stories(range(400, 420), end="today"))
    assert isinstance(nights.night(**refuses), StageResult), "what was accepted is not refused later"


def _pending(nights: Nights, made: StageResult) -> list[str]:
    return [row.prompt for row in problems_from_jsonl(_read(nights, made, "arrivals/pending-prompts.jsonl").encode())]


def _read(nights: Nights, made: StageResult, file: str) -> str:
    return nights.store.read_bytes(nights.store.resolve(made.uri), file).decode()


def check(nights: Nights, *arguments: str) -> int:
    """Look at what a night would take in, by the command."""
    run = {"name": "quickstart", "model": str(nights.model), "overrides": nights.overrides()}
    return main(["data", "check", *(f"-p={name}={json.dumps(value)}" for name, value in run.items()), *arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_check_shows_what_a_night_would_take_in_and_stores_nothing(
    nights: Nights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nights.arrive("a.jsonl", range(40))
    assert check(nights, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arrivals"]["ledger"] is None
    assert found["arrivals"]["roles"]["prompts"]["new_rows"] == 40
    assert check(nights) == 0
    assert "no ledger yet: no night of the project has ended" in capsys.readouterr().out
    nights.places = 16
    made = nights.night()
    nights.arrive("b.jsonl", range(30, 60))
    nights.arrive("c.jsonl", (), raw='{"prompt": ')
    nights.arrivals["settle_s"] = 60
    nights.arrive("d.jsonl", range(100, 120), age_s=1)
    before = contents(tmp_path / "store")
    assert check(nights, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert check(nights) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert contents(tmp_path / "store") == before
    assert told["arrivals"]["ledger"] == made.uri
    assert told["arrivals"]["roles"] == {
        "prompts": {
            "new_files": 2,
            "bad_files": 1,
            "new_rows": 20,
            "known_rows": 10,
            "waiting_rows": made.metrics["waiting_rows"],
        }
    }
    assert made.metrics["waiting_rows"] > 0
    assert [Path(each).name for each in told["arrivals"]["left_to_later"]] == ["d.jsonl"]
    assert f"by the ledger of {made.uri}" in lines
    assert re.search(r"prompts 2 1 20 10 \d+ left out: row 1 of .*c\.jsonl", lines)
    assert "d.jsonl may still be written to" in lines
    nights.arrivals["max_bad_files"] = 0.1
    assert check(nights) == 1
    assert "1 of 2 new files cannot be read" in capsys.readouterr().out


def test_a_check_of_data_that_arrive_takes_one_path(nights: Nights, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(nights, "one", "two") == 1
    assert "one path is checked" in " ".join(capsys.readouterr().err.split())
    assert main(["data", "check", "one", "-p", "episode=3"]) == 1
    assert "a check takes the parameters name, model" in " ".join(capsys.readouterr().err.split())
    without: dict[str, Any] = {"data.arrivals": {}, "data.demonstrations": None}
    assert main(["data", "check", "-p", f"model={nights.model}", "-p", f"overrides={json.dumps(without)}"]) == 1
    assert "data.arrivals needs sources that grow" in " ".join(capsys.readouterr().err.split())
    assert main(["data", "check", "one", "-p", "overrides=ppo.lr=1"]) == 1
    assert "overrides must be a mapping" in " ".join(capsys.readouterr().err.split())


def test_marks_tell_known_rows_and_grow_at_the_end() -> None:
    first = RowMarks().with_new([5, 3, 5])
    again = RowMarks(first)
    assert len(again) == 2
    assert again.are_known([3, 4, 5]) == [True, False, True]
    assert again.with_new([4, 3]).startswith(first)
    assert len(again.with_new([4, 3])) == 3 * 8


def test_the_ledger_is_stored_whole_with_its_dataset(nights: Nights) -> None:
    nights.arrive("a.jsonl", range(20))
    made = nights.prepare()
    assert nights.store.alias("dataset", "quickstart", LEARNT) is None
    manifest = nights.store.resolve(made.uri)
    assert {LEDGER, MARKS, "arrivals/learnt-prompts.jsonl"} <= {entry.path for entry in manifest.files}
    [file] = nights.ledger(made).files
    assert (file.rows, file.fault, file.name) == (20, None, str(nights.folder / "a.jsonl"))
