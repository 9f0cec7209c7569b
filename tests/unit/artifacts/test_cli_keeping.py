"""`rlhf artifacts` in everyday keeping: plan, diff, lineage down, promote, rollback, verify, collect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from infra.artifacts import ArtifactStore, open_default_store
from infra.artifacts.ref import blob_key
from tasks.report.cells import size
from tests.unit.artifacts.store_contract import sha256


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """A store, named by the settings: data, SFT, three policies, three training states, a champion."""
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_STORE_URL", (tmp_path / "store").as_uri())
    monkeypatch.delenv("RLHF_RETENTION", raising=False)
    store = open_default_store()
    data = store.commit("dataset", "d", {"rows": b"rows"})
    sft = store.commit("sft", "s", {"w": b"sft"}, parents=[data, "model/base"])
    for step in range(1, 4):
        config = {"ppo": {"lr": 0.1 * step}}
        files = {"w": b"policy%d" % step, "same": b"same"}
        store.commit("policy", "p", files, parents=[sft, data], config=config, metrics={"reward": 0.25 * step})
        store.commit("ppo-state", "r", {"w": b"state%d" % step}, version=step)
    store.commit("run", "n", {"report.md": b"report"}, parents=["policy/p"])
    store.set_alias("policy/p@1", "champion", why="first", who="test")
    return store


@pytest.fixture
def rlhf(store: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> Any:
    """Type a command line; return exit status, output and error output."""
    del store

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["artifacts", *words])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def test_plan_shows_what_a_run_resolved_in_the_order_in_which_it_asked(rlhf: Any, store: ArtifactStore) -> None:
    store.record("0b7c", "run", "what the preset says", {"lr": 0.1})
    store.record("0b7c", "ppo.actor", "actor", "sft/s@1")
    status, out, _ = rlhf("plan", "0b7c")
    assert status == 0
    assert [line.split(" UTC ")[1].split(maxsplit=1) for line in out.splitlines()] == [
        ["what", 'the preset says  {"lr": 0.1}'],
        ["actor", "sft/s@1"],
    ]
    facts = json.loads(rlhf("plan", "0b7c", "--json")[1])
    assert [(fact["flow_run"], fact["answer"]) for fact in facts] == [("0b7c", {"lr": 0.1}), ("0b7c", "sft/s@1")]


@pytest.mark.parametrize(
    ("run", "sentence"),
    [("another", "holds nothing that a run another resolved"), ("policy/p", "'policy/p' is no name of a run")],
)
def test_plan_of_what_is_no_run_is_refused(rlhf: Any, run: str, sentence: str) -> None:
    status, out, error = rlhf("plan", run)
    assert (status, out) == (1, "")
    assert sentence in error


def test_diff_shows_what_differs(rlhf: Any) -> None:
    status, out, _ = rlhf("diff", "policy/p@1", "policy/p@2")
    assert status == 0
    for line in ("policy/p@1 → policy/p@2", "ppo.lr  0.1  →  0.2", "reward  0.25  →  0.5"):
        assert line in out
    assert "files (1 file changed, 1 file same)" in out
    assert "changed  w  7 B → 7 B" in out
    assert "4 B of 11 B (36.4%) of policy/p@2 are blobs of policy/p@1 too" in out
    facts = json.loads(rlhf("diff", "policy/p@1", "policy/p@2", "--json")[1])
    assert facts["config"] == [{"name": "ppo.lr", "what": "changed", "before": 0.1, "after": 0.2}]


def test_diff_of_two_kinds_compares_what_both_have_and_counts_the_rest(rlhf: Any, store: ArtifactStore) -> None:
    both = {"config": {"seed": 1, "sft": {"lr": 0.1}}, "source_digest": "old", "parents": ["dataset/d@1", "model/base"]}
    own = {f"loss_{step}": 0.5 for step in range(30)}
    store.commit("sft", "two", {"w": b"1", "only": b"2"}, metrics={"seconds": 1.0, "steps": 30, **own}, **both)
    store.commit("dataset", "d", {"rows": b"more rows"})
    policy = {
        "config": {"seed": 2, "sft": {"lr": 0.1}},
        "source_digest": "new",
        "parents": ["dataset/d@2", "sft/two@1"],
    }
    store.commit(
        "policy", "two", {"w": b"3"}, metrics={"seconds": 2.0, "steps": 30, "kl": 0.5, "reward": 1.0}, **policy
    )
    status, out, _ = rlhf("diff", "sft/two", "policy/two")
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines == [
        "sft/two@1 → policy/two@1",
        "two kinds: what both have is compared, and what only one has is counted (--json names it)",
        "", "config", "seed 1 → 2",
        "", "metrics", "seconds 1.0 → 2.0", "only in sft/two@1: 30", "only in policy/two@1: 2",
        "", "parents", "dataset/d 1 → 2", "only in sft/two@1: 1", "only in policy/two@1: 1",
        "", "source", "old → new",
        "", "files (1 file changed, 1 file removed)", "changed w 1 B → 1 B",
        "0 B of 1 B (0.0%) of policy/two@1 are blobs of sft/two@1 too",
    ]  # fmt: skip
    facts = json.loads(rlhf("diff", "sft/two", "policy/two", "--json")[1])
    assert len(facts["metrics"]) == 1 + 30 + 2


def test_lineage_down_shows_what_was_made_from_it(rlhf: Any) -> None:
    lines = rlhf("lineage", "sft/s", "--down")[1].splitlines()
    assert [line.lstrip("│├└─ ").split()[0] for line in lines] == [
        "sft/s@1", "policy/p@1", "policy/p@2", "policy/p@3", "run/n@1",
    ]  # fmt: skip
    data, *made = json.loads(rlhf("lineage", "dataset/d", "--down", "--json")[1])
    assert [child["uri"] for child in data["children"]] == ["sft/s@1", "policy/p@1", "policy/p@2", "policy/p@3"]
    assert [each["uri"] for each in made] == [*(child["uri"] for child in data["children"]), "run/n@1"]


def test_promote_and_rollback_say_what_became_of_the_alias(rlhf: Any, store: ArtifactStore) -> None:
    told = rlhf("promote", "policy/p@2", "--why", "measured by hand")[1]
    assert told == "champion of policy/p points at policy/p@2 now; before, at policy/p@1\n"
    assert rlhf("promote", "policy/p@2", "--why", "x")[1] == "champion of policy/p points at policy/p@2 already\n"
    told = rlhf("rollback", "policy/p", "--why", "users complain", "--json")[1]
    assert json.loads(told) == {"uri": "policy/p@1", "alias": "champion", "before": "policy/p@2"}
    last = store.aliases("policy", "p")["champion"].history[-1]
    assert (last.uri, last.why) == ("policy/p@1", "users complain")
    assert "@" in last.who
    shown = rlhf("show", "policy/p@champion")[1]
    assert "history of champion" in shown
    assert "measured by hand" in shown
    assert rlhf("promote", "policy/p@3", "candidate", "--why", "x")[1].endswith("now; before, at nothing\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("rollback", "policy/p", "--why", "x"), "points at policy/p@1 and cannot be rolled back: it pointed at"),
        (("rollback", "policy/p@1", "--why", "x"), "'policy/p@1' is a version, but an alias is rolled back"),
        (("rollback", "policy/p", "nobody", "--why", "x"), "there is no alias 'nobody' of policy/p to roll back"),
        (("rollback", "policy/q", "--why", "x"), "the store has no policy/q (did you mean policy/p?); "),
        (("rollback", "policy/p"), "needs a reason"),
        (("promote", "policy/p@2", "--why", " "), "needs a reason"),
        (("promote", "policy/p@2"), "a move of an alias needs a reason, for whoever reads its history; give one"),
        (("promote", "dataset/d", "--why", "x"), "dataset/d@1 is a dataset, but the champion is a model; promote a"),
        (("promote", "run/n", "--why", "x"), "run/n@1 is a run, but the champion is a model; promote policy/p@3, or"),
        (("promote", "policy/p@2", "7", "--why", "x"), "'7' cannot be an alias: 'latest' and bare numbers already"),
        (("list", "policy/p@2"), "'policy/p@2' is one version, but a list is of a kind or of all versions"),
        (("lineage", "model/base"), "'model/base' came from outside: lineages name it, but the store holds nothing of"),
        (("promote", "policy/p@2", "latest", "--why", "x"), "'latest' cannot be an alias"),
        (("promote", "policy/p@9", "--why", "x"), "the versions of policy/p are 3, 2, 1"),
        (("show", "s3://other/policy/p@1"), "'s3://other/policy/p@1' is an address, and names no artifact of this"),
        (("diff", "policy/p@1", "file:///x/policy/p@1"), "is an address, and names no artifact of this store"),
        (("verify", "/policy/p"), "is an address, and names no artifact of this store"),
        (("lineage", "policy:p", "--down"), "'policy:p' is an address"),
        (("show", "policy/p@1@2"), "'policy/p@1@2' names no artifact: expected policy/name"),
        *((("collect", "--grace", text), "a grace time of 1 h is too short") for text in ("1", "1h", "1.0h")),
        *(
            (("collect", f"--grace={text}"), f"'{text}' is no grace time; expected hours or days, such as 36, 36h or")
            for text in ("nan", "inf", "-5", "1w", "", "1e9", "900000", "40000d")
        ),
        (("collect", "--retention", "polcy=1"), "names the kind 'polcy', which there is not (did you mean policy?)"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(rlhf: Any, words: tuple[str, ...], complaint: str) -> None:
    status, out, err = rlhf(*words)
    assert (status, out) == (1, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_verify_exits_with_1_when_something_is_wrong(rlhf: Any, tmp_path: Path) -> None:
    status, out, _ = rlhf("verify")
    assert status == 0
    assert "9 versions, 10 blobs, 56 B, read and hashed: all is well" in out
    (tmp_path / "store" / "keys" / "sft" / "k.json").write_text('{"uri": "sft/gone@1", "digest": "0"}')
    status, out, _ = rlhf("verify")
    assert (status, out.splitlines()[1]) == (0, "1 entry of the key index of versions that are gone: no problem")
    (tmp_path / "store" / blob_key(sha256(b"policy2"))).write_bytes(b"pOlicy2")
    assert rlhf("verify", "--quick")[0] == rlhf("verify", "policy/p@1")[0] == 0
    for more in ((), ("policy/p@2",)):
        status, out, _ = rlhf("verify", *more)
        assert status == 1
        assert "is damaged" in out.splitlines()[0]
        assert out.splitlines()[1].endswith("read and hashed: 1 problem")
    facts = json.loads(rlhf("verify", "--json")[1])
    assert (facts["versions"], facts["quick"], len(facts["problems"])) == (9, False, 1)


def test_collect_shows_what_could_go_and_deletes_only_when_told(
    rlhf: Any, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = rlhf("collect")[1]
    assert "kept are the newest: ppo-state=2; and all that an alias or a lease reaches" in out
    assert "ppo-state  1 version retired, 1 blob that nothing else reaches, 6 B" in out
    assert "nothing was written; --delete lists what is new" in out
    out = rlhf("collect", "--retention", "policy=1")[1]
    assert "policy     1 version retired, 1 blob" in out  # not the champion
    monkeypatch.setenv("RLHF_RETENTION", "ppo-state=all")
    assert "nothing is unneeded" in rlhf("collect")[1]
    monkeypatch.delenv("RLHF_RETENTION")
    out = rlhf("collect", "--delete")[1]
    assert "deleted: 0 versions, 0 blobs, 0 B; newly listed: 1 version, 0 blobs, to be deleted after 24 hours" in out
    facts = json.loads(rlhf("collect", "--json")[1])
    assert facts["lists"][0]["versions"] == ["ppo-state/r@1"]
    assert facts["newly_listed"] == {"versions": [], "blobs": 0}
    assert len(store.list("ppo-state")) == 3
    for grace, hours in (("36", 36), ("36h", 36), ("2d", 48), ("1.5d", 36)):
        assert json.loads(rlhf("collect", "--grace", grace, "--json")[1])["grace_hours"] == hours


def test_a_rule_in_the_settings_that_cannot_be_read_is_one_sentence(rlhf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_RETENTION", "policy=few")
    assert "the retention 'policy=few' keeps 'few' of policy" in rlhf("collect")[2]


def test_sizes_read_as_people_write_them() -> None:
    assert [size(count) for count in (0, 999, 1000, 2_500_000, 3e12)] == ["0 B", "999 B", "1.0 kB", "2.5 MB", "3.0 TB"]
