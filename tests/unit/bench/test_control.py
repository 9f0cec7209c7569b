"""More SFT in PPO's place, on a model of two layers."""

from __future__ import annotations

from pathlib import Path

from bench.comparison import control
from bench.comparison.runs import Run
from flows.presets import resolve
from infra.artifacts import open_store
from rlhf_core.data.problems import Problem, problems_to_jsonl
from tests.tiny_llama import write_tiny_llama


def test_more_sft_goes_on_from_the_start_on_ppos_problems_for_ppos_time(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    sft = store.commit("sft", "evidence-1", write_tiny_llama(tmp_path / "start"))
    learnt = [Problem(f"Say {word}", word) for word in ("a", "b", "c")]
    held_out = [Problem("Say d", "d"), Problem("Say e", "e")]
    files = {"ppo.jsonl": problems_to_jsonl(learnt), "evaluation.jsonl": problems_to_jsonl(held_out)}
    data = store.commit("dataset", "evidence-1", files)
    small = {"sft.batch_size": 2, "sft.micro_batch_size": 2, "sft.dtype": "float32", "evaluation.max_new_tokens": 40}
    stages = {"data": {"uri": data.uri}, "sft": {"uri": sft.uri}, "ppo": {"seconds": 1e-4}}
    run = Run("run/evidence-1@1", resolve("evidence", overrides=small), stages, {}, ())
    more = control.more_sft(store, run, lambda problem: f"<answer>not {problem.answer}</answer>")
    assert (more.steps, more.demonstrations) == (1, 3)  # no step is as short as PPO's time here: one is taken
    assert [outcome.key for outcome in more.outcomes] == [problem.key for problem in held_out]
    assert more.seconds > 0
    assert more.last_loss > 0
