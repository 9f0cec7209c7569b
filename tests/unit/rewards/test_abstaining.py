"""Calls that fail are no verdicts: nothing is paid for their samples, and nothing learnt from them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import cloudpickle
import pytest
import torch

from rlhf_core.errors import DataError, TrainingError
from rlhf_core.rewards.abstaining import check_share
from rlhf_core.rewards.process import RewardProcess
from rlhf_core.rewards.resolve import RewardFunction
from rlhf_core.rewards.scoring import Weighted, WeightedScorer
from rlhf_core.rewards.sources import FunctionScores, Judged, ScoringBatch
from rlhf_core.types import Prompt


@pytest.fixture
def process() -> Iterator[RewardProcess]:
    made = RewardProcess(10.0)
    yield made
    made.close()


def batch(*responses: str) -> ScoringBatch:
    rows = len(responses)
    prompts = [Prompt((5,), "6 x 7", "42", f"key{row}") for row in range(rows)]
    ones = torch.ones(rows, 1, dtype=torch.bool)
    tokens = torch.ones(rows, 2, dtype=torch.long)
    return ScoringBatch(prompts, responses, torch.ones(rows, dtype=torch.bool), tokens, tokens.bool(), ones)


def function(name: str, target: object) -> RewardFunction:
    return RewardFunction(name, cloudpickle.dumps((target, {})))


def test_a_verifier_that_is_killed_judges_the_next_response_again(process: RewardProcess) -> None:
    source = FunctionScores(function("mine", lambda _prompt, response, _answer: len(response)), process)
    scorer = WeightedScorer([Weighted("mine", 1.0, source)])
    assert not scorer.score(batch("a")).abstains.any()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    scores = scorer.score(batch("ab", "abc"))
    assert scores.abstains.tolist() == [True, False]
    assert scores.failures == [{"mine": "died: it ended its process (SIGKILL)"}, {}]
    assert scores.total.tolist() == [0.0, 3.0]
    assert scores.raw["mine"].isnan().tolist() == [True, False]


def test_one_source_that_fails_abstains_for_all_unless_it_has_no_weight(process: RewardProcess) -> None:
    def moody(_prompt: str, response: str, _answer: str) -> float:
        return {"good": 1.0}[response]

    fails = FunctionScores(function("moody", moody), process)

    def sure(given: ScoringBatch) -> Judged:
        found = torch.ones(len(given.responses))
        return Judged(found, {"sure": found})

    for weight, abstains in ((0.5, [False, True]), (0.0, [False, False])):
        scores = WeightedScorer([Weighted("sure", 2.0, sure), Weighted("moody", weight, fails)]).score(
            batch("good", "bad")
        )
        assert scores.abstains.tolist() == abstains
        assert scores.failures == [{}, {"moody": "raised: it raised KeyError: 'bad'"}]
        assert scores.total.tolist() == [2.0 + weight, 0.0 if weight else 2.0]
        assert scores.parts["sure"].tolist() == [2.0, 0.0 if weight else 2.0]


def test_above_the_share_a_sentence_names_function_reason_count_and_what_to_do() -> None:
    failures = [{"mine:f": "timed_out: it took longer than 1 s"}] * 2 + [{"mine:f": "raised: it raised OSError: no"}]
    check_share(failures, abstained=3, of=6, most=0.5, what="samples")
    with pytest.raises(TrainingError) as caught:
        check_share([*failures, {"other": "died: x"}], abstained=4, of=6, most=0.5, what="samples of episode 2")
    assert str(caught.value) == (
        "4 of 6 samples of episode 2 could not be judged, more than ppo.max_abstained allows (0.5): mine:f failed 3 "
        "times (timed out 2, raised 1; first, it took longer than 1 s); repair what it needs and start the run again, "
        "which goes on from its last commit, or raise ppo.max_abstained"
    )
    assert not caught.value.passes
    assert caught.value.ends_as == "Failed: rewards that abstain"
    with pytest.raises(DataError, match=r"^1 of 1 answers could not be judged, .* allows \(0\); repair"):
        check_share([], abstained=1, of=1, most=0.0, what="answers", error=DataError)
