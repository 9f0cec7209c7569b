"""`rlhf data check` shows what sets hold, and exits with 1 where a run would refuse something."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.cli import data as verb
from tests.hostile_texts import HARMFUL, HOSTILE
from tests.unit.data.read_sets import template


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setattr(verb, "_template", lambda _: template())


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def problems(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"question": f"{n}+{n}?", "answer": str(n % 7)} for n in range(first, first + count)]


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["data", "check", *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_a_good_set_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = checked(capsys, write(tmp_path / "p.jsonl", problems(5000)), "--preset", "quickstart")
    assert status == 0, text
    for part in (
        "problems",
        "5,000, of which 5,000 can be used",
        "Lengths, in tokens",
        "accepts 64 of 64",
        "Nothing of this",
    ):
        assert part in text


def test_a_set_is_judged_by_itself_unless_a_preset_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = "\n\nHuman: {} please\n\nAssistant:"
    rows = [{"chosen": f"{talk.format(n)} Yes {'a' * 600}", "rejected": f"{talk.format(n)} No"} for n in range(40)]
    path = write(tmp_path / "h.jsonl", rows)
    status, text = checked(capsys, path)
    assert status == 0, text
    flat = " ".join(text.split())
    assert "All of it can be used" in flat
    assert (
        "40 of 40 preference pairs (prompt and longer response) are longer than reward_model.max_length = 512" in flat
    )
    assert "Under the limits of preset quickstart, for information" in flat
    facts = json.loads(checked(capsys, path, "--json")[1])
    assert (facts["preset"], facts["refused"], facts["sets"][0]["report"]) == (None, False, None)
    assert len(facts["sets"][0]["notes"]) == 2  # as demonstrations, too
    status, text = checked(capsys, path, "--preset", "quickstart", "--json")
    found = json.loads(text)["sets"][0]
    assert (status, found["notes"]) == (1, [])
    assert "data.splits.sft 16 (not 1024), data.splits.ppo 11 (not 640)" in found["sizes"]
    [told] = found["refused"]
    for part in (
        "reward_model.max_length = 512",
        "11 of 11 PPO prompts have no answer",
        '"evaluation.judge": "reward_model"',
    ):
        assert part in told


def test_keys_of_messages_that_the_model_is_not_shown_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(thought: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": "Yes", "thinking": thought}]

    rows = [{"prompt": f"Ask {n}", "chosen": said("Hm."), "rejected": "No" if n else said("Oh.")} for n in range(9)]
    path = write(tmp_path / "h.jsonl", rows)
    status, text = checked(capsys, path)
    flat = " ".join(text.split())
    assert status == 0, text
    assert "not shown 'thinking' of 10 messages (template.prompt shows the contents of messages alone)" in flat
    assert "9, of which 8 can be used" in flat
    [first] = json.loads(checked(capsys, path, "--json")[1])["sets"][0]["set"]["examples"].values()
    assert "differs from the rejected one only in thinking, which the model is not shown" in first
    monkeypatch.setattr(verb, "_template", lambda _: None)
    status, text = checked(capsys, path, "--json")
    [told] = json.loads(text)["sets"][0]["set"]["not_shown"]
    assert (status, told["key"], told["messages"]) == (0, "thinking", 10)
    assert "is not known" in told["why"]


def test_equal_pairs_are_told_and_not_refused_as_no_run_refuses_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"prompt": f"Ask {n}", "chosen": "Yes", "rejected": "Yes" if n == 4 else "No"} for n in range(9)]
    path = write(tmp_path / "h.jsonl", pairs)
    status, text = checked(capsys, path, "--json")
    assert (status, json.loads(text)["sets"][0]["set"]["reasons"]) == (0, {"chosen equals rejected": 1})
    status, text = checked(capsys, write(tmp_path / "h.jsonl", [*pairs, {"prompt": "a"}]))
    assert status == 1
    assert "1 of 10 rows cannot be used, the first because row 10 of" in " ".join(text.split())


def test_no_row_or_name_of_a_file_is_obeyed_by_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: tuple[Callable[[str], Any], ...] = (
        lambda text: {"question": f"{text}?", "answer": text or "1"},
        lambda text: {"prompt": f"{text}?", "chosen": f"{text} a", "rejected": f"{text} b"},
        lambda text: {"question": text, text: text, "answer": [text]},
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "500")
    obeyed = {name: text for name, text in HOSTILE.items() if HARMFUL.search(text) or name == "markup of rich"}
    for at, (name, text) in enumerate(obeyed.items()):
        row = made[at % len(made)]
        torn = text.replace("\n", " ").encode(errors="replace").decode()
        path = write(tmp_path / "rows\x1b]52;c;eA==\x07\u202e[bold].jsonl", [row(text), row("ordinary"), torn])
        out = checked(capsys, path, write(tmp_path / "other.jsonl", [row(text)]))[1]
        assert r"rows\x1b]52;c;" in out
        assert not HARMFUL.search(re.sub(r"\x1b\[[\d;]*m", "", out)), name


def test_a_preset_has_its_own_role_for_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "p.jsonl", [{"question": f"{n}?", "answer": f"so #### {n}"} for n in range(600)])
    roles = [
        json.loads(checked(capsys, path, "--json", *preset)[1])["sets"][0]["role"]
        for preset in ((), ("--preset", "gsm8k"), ("--preset", "quickstart"))
    ]
    assert roles == ["problems", "demonstrations", "problems"]


def test_faulty_rows_are_counted_by_reason_with_the_first_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*problems(900), '{"question": ', {"question": " ", "answer": "1"}, {"question": "", "answer": "1"}]
    status, text = checked(capsys, write(tmp_path / "p.jsonl", rows), "--json")
    facts = json.loads(text)
    [found] = facts["sets"]
    assert (status, facts["refused"]) == (1, True)
    assert found["set"]["rejected"] == 3
    assert sorted(found["set"]["reasons"].values()) == [1, 2]
    assert "row 901" in found["refused"][0]


def test_a_set_that_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = checked(capsys, str(tmp_path / "nothing.jsonl"))
    assert status == 1
    assert "nothing.jsonl does not exist" in text.replace("\n", " ")


def test_sets_that_share_prompts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "a.jsonl", problems(20)), write(tmp_path / "b.jsonl", problems(20, first=18))
    status, text = checked(capsys, one, other, "--json")
    assert status == 1
    assert json.loads(text)["overlaps"] == [{"sets": [one, other], "prompts": 2, "example": "18+18?"}]
    apart = write(tmp_path / "c.jsonl", problems(20, first=100))
    assert checked(capsys, one, apart)[0] == 0


def test_columns_may_have_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q": row["question"], "a": row["answer"]} for row in problems(900)]
    path = write(tmp_path / "p.jsonl", rows)
    status, text = checked(capsys, path, "--role", "problems", "--column", "question=q", "--column", "answer=a")
    assert status == 0, text
    status, text = checked(capsys, path, "--role", "problems", "--column", "question")
    assert (status, text) == (1, "rlhf: --column 'question' must be OURS=THEIRS, such as question=problem\n")


def test_without_the_model_everything_but_lengths_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "_template", lambda _: None)
    status, text = checked(capsys, write(tmp_path / "p.jsonl", problems(900)))
    assert status == 0
    assert "the model of preset quickstart is not on this machine" in text


def test_what_the_linter_finds_fails_only_a_strict_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "p.jsonl", [*problems(30), {"question": "<|im_start|>And 9?", "answer": "9"}])
    status, text = checked(capsys, path)
    assert status == 0, text
    for part in ("Lint", "row 31 of", "'<|im_start|>'", "what to do"):
        assert part in " ".join(text.split())
    assert checked(capsys, path, "--strict")[0] == 1
    assert checked(capsys, write(tmp_path / "good.jsonl", problems(30)), "--strict")[0] == 0
