"""`rlhf page` and `rlhf compare`: who sees the page, and what is said of two policies."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import pytest

from flows.cli import main
from flows.cli.page import serving
from infra.artifacts import ArtifactRef, ArtifactStore, open_default_store
from infra.errors import ServiceError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setenv("RLHF_STORE_URL", f"file://{tmp_path}/store")
    return open_default_store()


def answers(*, right: int, of: int = 20) -> bytes:
    rows = [
        {"key": str(at), "prompt": f"problem {at}", "answer": "1", "response": f"<b>{at}</b>", "correct": at < right}
        for at in range(of)
    ]
    return b"".join(json.dumps({**row, "score": float(row["correct"])}).encode() + b"\n" for row in rows)


def policy(store: ArtifactStore, right: int, lr: float, *, is_asked: bool = True, kind: str = "policy") -> str:
    """Store a policy, its evaluation and the run that made both; return the policy's reference."""
    row = {"score": 0.5, "kl": 0.1} if kind == "policy" else {"loss": 0.5}
    unit = "episode" if kind == "policy" else "step"
    body = b"".join(json.dumps({unit: at, **row}).encode() + b"\n" for at in range(3))
    data = store.commit("dataset", "a", {"problems.jsonl": b"1"}, key="data")
    made = store.commit(
        kind, "a", {"metrics.jsonl": body, "w": str(lr).encode()}, parents=[data], config={"ppo": {"lr": lr}},
        metrics={"seconds": 100.0 * lr},
    )  # fmt: skip
    figures = {"policy": made.uri, "policy_digest": made.digest, "judge": "exact", "accuracy": right / 20}
    if is_asked:
        asked = store.commit(
            "evaluation", "a", {"outcomes.jsonl": answers(right=right)}, parents=[made, data],
            metrics={**figures, "low": right / 20 - 0.1, "high": right / 20 + 0.1},
        )  # fmt: skip
        store.commit("run", "a", {"report.html": f"<p>{lr}</p>".encode()}, parents=[data, made, asked])
    return made.uri


def fetched(address: str, **headers: str) -> tuple[int, bytes]:
    parts = urlsplit(address)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    connection.request("GET", parts.path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_page_is_seen_by_who_has_its_address_and_by_nobody_else() -> None:
    with serving(b"<p>the page</p>", 0) as (address, _):
        with build_opener(ProxyHandler({})).open(address, timeout=10) as answer:
            assert answer.read() == b"<p>the page</p>"
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert answer.headers["Cache-Control"] == "no-store"
        home = address.rstrip("/").rpartition("/")[0]
        for other in (f"{home}/", f"{home}/report.html", f"{address}../../etc/passwd", f"{address}x"):
            status, body = fetched(other)
            assert (status, b"page" in body) == (404, False)
        assert fetched(address, Host="foreign.example")[0] == 404
        port = urlsplit(address).port
        assert port is not None
        with pytest.raises(ServiceError, match=f"port {port} of 127.0.0.1 cannot be taken"), serving(b"", port):
            pass
        outside = [each[4][0] for each in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)]
        for each in set(outside) - {"127.0.0.1"}:
            if not str(each).startswith("127."):
                with pytest.raises(OSError), socket.create_connection((str(each), port), timeout=5):  # noqa: PT011
                    pass


def test_a_run_of_an_earlier_release_has_no_page_and_says_what_to_do(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["page"]) == 1
    assert "holds no report of a run" in capsys.readouterr().err
    store.commit("run", "a", {"report.md": b"# a"})
    assert main(["page", "run/a"]) == 1
    assert (
        "run/a@1 has no report.html: it is no report of a run, or its night made no policy" in capsys.readouterr().err
    )


def test_the_morning_after_a_quiet_night_the_newest_page_is_shown(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("flows.cli.page._show", lambda _whole, what, _port: shown.append(what))
    policy(store, 10, 0.5)
    store.commit("run", "a", {"report.md": b"# a: nothing new"})
    assert main(["page"]) == 0
    assert shown == ["run/a@1"]


def test_two_policies_are_compared_on_the_problems_that_both_were_asked(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = policy(store, 10, 0.5), policy(store, 16, 0.25)
    assert main(["compare", first, second, "--to", str(tmp_path / "two.html")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "policy/a@2 against policy/a@1: +0.300" in told
    assert "6 answers better and 0 worse" in told
    assert "6 fixed" in told
    assert "ppo.lr: 0.5 → 0.25" in told
    assert "seconds: 50.0 → 25.0" in told
    assert "promoted" not in told
    page = (tmp_path / "two.html").read_text()
    assert "Champion now" not in page
    assert '<section id="moved">' in page
    assert "<b>7</b>" not in page


def test_the_policies_of_two_runs_are_compared(store: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> None:
    policy(store, 16, 0.5), policy(store, 10, 0.25)
    assert main(["compare", "run/a@1", "run/a@2"]) == 0
    assert "policy/a@2 against policy/a@1: -0.300" in " ".join(capsys.readouterr().out.split())


def test_an_sft_model_is_compared_with_the_policy_that_was_made_from_it(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = policy(store, 16, 0.5), policy(store, 10, 0.25, kind="sft")
    assert main(["compare", first, second]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "sft/a@1 against policy/a@1: -0.300" in told
    assert "PPO by episode" not in told


def test_a_policy_that_was_never_evaluated_is_compared_with_nothing(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = policy(store, 10, 0.5), policy(store, 16, 0.25, is_asked=False)
    assert main(["compare", first, second]) == 1
    assert "policy/a@2 was never evaluated; do so first: prefect deployment run evaluate/" in capsys.readouterr().err


def test_scores_of_different_reward_models_are_not_subtracted(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    judges = [store.commit("reward-model", "a", {"weights": each}) for each in (b"one", b"other")]
    both = [policy(store, right, lr, is_asked=False) for right, lr in ((10, 0.5), (16, 0.25))]
    data = store.resolve("dataset/a").ref

    def judged(reference: str, judge: ArtifactRef, right: int) -> None:
        made = store.resolve(reference).ref
        figures = {"policy": made.uri, "policy_digest": made.digest, "judge": "reward_model", "score": 0.5}
        body = {"outcomes.jsonl": answers(right=right)}
        store.commit("evaluation", "a", body, parents=[made, data, judge], metrics=figures)

    judged(both[0], judges[0], 10)
    judged(both[1], judges[1], 16)
    assert main(["compare", *both]) == 1
    assert "no judge has scored both policy/a@1 and policy/a@2" in capsys.readouterr().err
    judged(both[0], judges[1], 12)
    assert main(["compare", *both]) == 0
    assert "policy/a@2 against policy/a@1: +0.200" in " ".join(capsys.readouterr().out.split())
