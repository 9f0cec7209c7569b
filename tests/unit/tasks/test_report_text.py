"""The report's words: tables, samples and what keeps a model's output from being obeyed."""

from __future__ import annotations

from typing import Any

from markdown_it import MarkdownIt

from rlhf_core.escaping import SHOWN_LENGTH, code, table
from rlhf_core.gating.conditions import Condition
from tasks.report.facts import Facts
from tasks.report.page import with_pictures
from tasks.report.samples import changes, chosen_samples, samples_document
from tasks.report.tables import (
    EPISODE_TABLES,
    MOST_EPISODES,
    episode_tables,
    evaluation_table,
    stage_figures,
    time_table,
)
from tasks.report.text import EPISODES, EVALUATION, report_text
from tasks.results import Decision, StageResult

NASTY = "a | b\n```sh\n<img src=x onerror=alert(1)> **bold** \\| `tick` &lt; ![x](ppo.png)\x1b[31m"
HTML = MarkdownIt("commonmark").enable("table").render


def stage(name: str, *, reused: bool = False, seconds: float = 1.0, **metrics: Any) -> StageResult:
    return StageResult(stage=name, uri=f"{name}/test@1", digest="0", reused=reused, seconds=seconds, metrics=metrics)


def evaluation(policy: str, **metrics: Any) -> StageResult:
    figures = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "well_formed": 1.0, "truncated": 0.25, "judge": "exact"}
    return stage("evaluate", policy=policy, **{**figures, **metrics})


def facts(**changed: Any) -> Facts:
    told: dict[str, Any] = {
        "name": "test",
        "stages": [stage("data", problems_sft=3), stage("ppo", episodes=1, seconds_learn=61.0)],
        "evaluations": {"ppo": evaluation("policy/test@1")},
        "decision": Decision(
            promote=True, reason="better", policy="policy/test@1", incumbent="sft/test@1", champion=None,
            difference=0.1, low=0.05, high=0.15,
        ),
        "champion": "policy/test@1",
        "wall_s": 100.0,
        "episodes": [{"episode": 0, "score": 0.5, "kl": 0.0}],
        "training": {},
        "samples": [],
        "changes": None,
        "flow_run": None,
        "page": None,
        "lineage": ["policy/test@1"],
    }  # fmt: skip
    return Facts(**{**told, **changed})


def test_what_a_model_wrote_stays_one_cell_and_is_shown_as_it_is() -> None:
    html = HTML(table(["x", "y"], [[code(NASTY), "after"]]))
    assert html.count("<tr>") == 2
    assert html.count("<td>") == 2
    assert "<img" not in html
    assert "<strong>" not in html
    assert "a │ b ⏎ ```sh ⏎ &lt;img src=x onerror=alert(1)&gt; **bold** \\│ `tick` &amp;lt; ![x](ppo.png)\\x1b" in html


def test_why_a_person_made_a_champion_is_words_on_the_page_and_in_the_runs_state() -> None:
    why = "see ![x](https://foreign.example/t.png) \x1b[2J <b>"
    decision = facts().decision.model_copy(update={"promote": False, "reason": f"policy/test@1 is it ({why})"})
    html = HTML(report_text(facts(decision=decision), {}))
    assert "<img" not in html
    assert "<b>" not in html
    assert "\x1b" not in html
    assert "\\x1b[2J" in html
    assert "<strong>Is the champion already.</strong>" in html


def test_backticks_at_the_ends_and_empty_texts_survive() -> None:
    assert "<code>`a``</code>" in HTML(code("`a``"))
    assert code("") == "(empty)"
    assert "⏎" in code("\n")
    assert code("   ") == "(blank)"


def test_a_long_text_is_cut_in_the_middle_and_says_so() -> None:
    cut = code("a" * SHOWN_LENGTH + "z" * 7)
    assert " … 7 characters … " in cut
    assert cut.endswith("z" * 7 + "`")
    assert code("b" * SHOWN_LENGTH) == f"`{'b' * SHOWN_LENGTH}`"


def test_a_column_that_is_empty_everywhere_is_left_out() -> None:
    assert table(["a", "b"], [["1", ""], ["2", ""]]) == "| a |\n| --- |\n| 1 |\n| 2 |"
    assert table(["a", "b"], []) == "| a | b |\n| --- | --- |"


def test_accuracy_stands_beside_the_best_constant_answer_and_the_accuracy_given_the_form() -> None:
    rows = {
        "sft": evaluation("sft/test@1", accuracy_given_form=0.625, constant_accuracy=0.125, constant_answer="a|b"),
        "champion": evaluation("policy/old@3"),  # an older artifact knows neither
    }
    lines = evaluation_table(rows).splitlines()
    assert lines[0] == "|  | right [95% interval] | right, given the form | well formed | cut off |"
    assert lines[2] == "| sft | 0.500 [0.400, 0.600] | 0.625 | 1.000 | 0.250 |"
    assert lines[3] == "| champion | 0.500 [0.400, 0.600] |  | 1.000 | 0.250 |"
    assert lines[4] == "| best constant answer | 0.125 |  |  |  |"
    assert lines[-1] == "Of these, sft is sft/test@1, champion is policy/old@3."
    assert "Always answering `a|b` would be right 0.125 of the time." in report_text(facts(evaluations=rows), {})


def test_answers_that_nobody_judged_are_counted_beside_the_figures_that_they_are_not_in() -> None:
    lines = evaluation_table({"sft": evaluation("sft/test@1", unjudged=0), "ppo": evaluation("ppo", unjudged=7)})
    header, _, sft, ppo, *_ = lines.splitlines()
    assert header.endswith("| cut off | not judged |")
    assert sft.endswith("| 0.250 |  |")
    assert ppo.endswith("| 0.250 | 7 |")


def test_where_a_reward_model_judges_its_mean_score_is_shown() -> None:
    judged = evaluation("policy/test@1", judge="reward_model", score=-0.5, low=-0.75, high=-0.25)
    lines = evaluation_table({"ppo": judged}).splitlines()
    assert lines[0] == "|  | mean score [95% interval] | ended | cut off |"
    assert lines[2] == "| ppo | -0.500 [-0.750, -0.250] | 1.000 | 0.250 |"
    assert lines[-1] == "Of these, ppo is policy/test@1."


def test_the_reward_model_is_told_of_overall_and_on_well_formed_pairs() -> None:
    known: dict[str, Any] = {"accuracy": 0.75, "low": 0.5, "high": 0.875, "heldout_pairs": 40}
    formed: dict[str, Any] = {
        f"well_formed_{name}": value for name, value in (("accuracy", 0.5), ("low", 0.25), ("high", 0.75))
    }
    told = stage_figures(stage("reward-model", **known, **formed, well_formed_pairs=12))
    assert told == ("0.750 [0.500, 0.875] right of 40 held-out pairs, 0.500 [0.250, 0.750] of the 12 both well formed")
    assert stage_figures(stage("reward-model", **known)) == "0.750 [0.500, 0.875] right of 40 held-out pairs"


def test_sft_tells_how_flat_its_loss_is_and_how_much_is_well_formed() -> None:
    sft = stage("sft", steps=24, first_loss=2.0, last_loss=0.5, flatness=0.02, flatness_error=0.01)
    told = stage_figures(sft, facts(evaluations={"sft": evaluation("sft/test@1", well_formed=0.96)}))
    assert told == (
        "loss 2.000 to 0.500 in 24 steps, flat (-2.0% over the last quarter of the steps, standard error 1.0%), "
        "0.960 of held-out answers well formed"
    )


def test_a_large_change_within_its_scatter_is_not_called_flat() -> None:
    sft = stage("sft", steps=1, first_loss=2.0, last_loss=0.5, flatness=0.524, flatness_error=0.3)
    assert stage_figures(sft) == (
        "loss 2.000 to 0.500 in 1 step, without a clear trend (-52.4% over the last quarter of the steps, "
        "standard error 30.0%)"
    )


def test_ppo_tells_the_share_of_variance_that_the_reward_model_brings() -> None:
    episodes = [{"episode": at, "reward_share_reward_model": share} for at, share in enumerate((0.1, 0.3))]
    first: dict[str, Any] = {"first_raw/verifier": 0.25, "first_verifier": 0.25}
    policy = stage("ppo", episodes=2, last_kl=0.5, **first)
    assert stage_figures(policy, facts(episodes=episodes)) == (
        "verifier 0.250, KL 0.500 nats, 2 episodes, 20.0% of the reward's variance from the reward model"
    )


def test_several_trainers_are_told_and_one_alone_is_not() -> None:
    several: dict[str, Any] = {"trainers": 2, "strategy": "zero2"}
    assert stage_figures(stage("ppo", episodes=2, **several)) == "2 episodes, 2 trainers under zero2"
    sft = stage("sft", steps=24, first_loss=2.0, last_loss=0.5, trainers=1, strategy="gemini")
    assert stage_figures(sft) == "loss 2.000 to 0.500 in 24 steps, 1 trainer under gemini"
    pairs: dict[str, Any] = {"accuracy": 0.75, "heldout_pairs": 40}
    told = stage_figures(stage("reward-model", **pairs, **several))
    assert told.endswith(" right of 40 held-out pairs, 2 trainers under zero2")


def test_where_nobody_verified_no_share_of_right_answers_is_told() -> None:
    row = {"episode": 0, "score": 0.5, "verifier": 0.0, "well_formed": 0.0, "accuracy_given_form": 0.0}
    assert episode_tables([row]) == "| episode | score |\n| --- | --- |\n| 1 | 0.500 |"
    assert "| episode | score | verifier's score |" in episode_tables([{**row, "raw/verifier": 0.0}])


def test_many_episodes_are_thinned_out_and_say_so() -> None:
    lines = episode_tables([{"episode": at, "score": float(at)} for at in range(100)]).splitlines()
    assert lines[2] == "| 1 | 0.000 |"
    assert lines[1 + MOST_EPISODES] == "| 100 | 99.000 |"
    assert lines[-1] == "Left out here: 70 episodes; metrics.jsonl has all of them."


LONG = "x" * SHOWN_LENGTH
PAGE_WIDTH = 700
"""Pixels that a run's page in Prefect leaves to a table where the window is 1280 wide; measured in a browser."""
CHARACTER, CELL = 7.1, 24
"""Pixels of a letter of the page's font and of a cell's sides, measured there, too."""


def test_no_table_of_a_page_is_wider_than_the_page() -> None:
    roles = ("base", "sft", "start", "ppo", "champion")
    policy = f"policy/{'a' * 63}@12345"
    figures = {"accuracy_given_form": 0.5, "constant_accuracy": 0.5, "constant_answer": LONG}
    episodes = [{"raw/verifier": 0.5, "staleness": 1.0, "episode": 9999, **dict.fromkeys(names, -123.456)}
                for names in EPISODE_TABLES]  # fmt: skip
    shown = {
        "evaluations": {role: evaluation(policy, **figures) for role in roles},
        "episodes": [{name: value for row in episodes for name, value in row.items()}],
        "changes": changes([outcome(LONG)], [outcome(LONG, correct=True)], by_model=False, seed=0),
    }
    samples = samples_document([{"why": "best", **sample(1.0, 3), "prompt": LONG}], shown["changes"], policy=policy)
    lines = (report_text(facts(**shown), {}) + samples).splitlines()
    tables = [[cells.strip() for cells in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert len(tables) > 4 * 3  # of the evaluation, of the episodes, of the time
    start = 0
    for end in range(1, len(tables) + 1):
        if end == len(tables) or len(tables[end]) != len(tables[start]) or tables[end][0] in {"", "episode"}:
            columns = zip(*tables[start:end], strict=True)
            width = sum(max(map(len, column)) * CHARACTER + CELL for column in columns)
            assert width <= PAGE_WIDTH, tables[start]
            start = end


def test_time_that_no_stage_of_this_run_took_is_told_apart() -> None:
    stages = [stage("sft", reused=True, seconds=500.0), stage("ppo", seconds=61.0, seconds_learn=60.0)]
    told = time_table(facts(stages=stages, evaluations={}, wall_s=100.0))
    assert "| sft | 8:20 min | from the store |" in told
    assert "| of ppo: learn | 1:00 min |  |" in told
    assert "| starting processes, storing, waiting | 39 s |  |" in told


def sample(score: float, length: int) -> dict[str, Any]:
    return {"prompt": f"p{score}", "answer": "", "response": NASTY, "score": score, "kl": 0.5, "length": length}


def test_best_worst_longest_and_random_samples_are_chosen_once_each() -> None:
    samples = [sample(float(at), length=40 - at) for at in range(10)]
    chosen = chosen_samples(samples, seed=1)
    assert [(row["why"], row["score"]) for row in chosen[:2]] == [("best", 9.0), ("worst, longest", 0.0)]
    assert [row["why"] for row in chosen[2:]] == ["random"] * 3
    assert len({row["score"] for row in chosen}) == 5
    assert chosen == chosen_samples(samples, seed=1)
    assert chosen != chosen_samples(samples, seed=2)
    assert chosen_samples([], seed=1) == []
    assert [row["why"] for row in chosen_samples(samples[:1], seed=1)] == ["best, worst, longest"]


def test_samples_that_abstain_are_neither_best_nor_worst_and_say_who_failed() -> None:
    failed = {"failures": {"mine:f": f"raised: it raised OSError: {NASTY}"}, "abstains": True}
    samples = [sample(0.5, 3), {**sample(0.0, 40), **failed}, sample(1.0, 3), sample(0.75, 3)]
    chosen = chosen_samples(samples, seed=1)
    assert [(row["why"], row["score"]) for row in chosen[:2]] == [("best", 1.0), ("worst", 0.5)]
    page = HTML(samples_document(chosen, None, policy="policy/test@1"))
    assert "longest: abstains, KL 0.500 nats" in page
    assert page.count("not judged: <code>mine:f: it raised OSError: a | b ⏎") == 1
    assert "<img" not in page


def test_calls_that_failed_are_counted_below_the_episodes() -> None:
    rows = [{"episode": at, "score": 0.5, "abstained": 0.25 * at, "failed/mine:f/timed_out": 3.0} for at in range(2)]
    shown = episode_tables([*rows, {"episode": 2, "score": 0.5, "abstained": 0.0, "failed/verifier/raised": 1.0}])
    assert "| episode | score | abstained |" in shown
    assert shown.endswith("Calls of judges that failed: mine:f timed out 6, verifier raised 1.")
    assert "abstained" not in episode_tables([{"episode": 0, "score": 0.5, "abstained": 0.0}])


def test_answers_without_a_verdict_have_not_changed() -> None:
    unknown = {"failure": "died: it ended its process (SIGKILL)"}
    before = [outcome("a"), outcome("b"), outcome("c", correct=True)]
    after = [outcome("a", correct=True), {**outcome("b"), **unknown}, outcome("c", correct=True)]
    counts = changes(before, after, by_model=False, seed=0)["counts"]
    assert counts == {"wrong → right": 1, "right → wrong": 0, "both right": 1, "both wrong": 0}


def outcome(key: str, *, correct: bool = False, score: float = 0.0) -> dict[str, Any]:
    return {"key": key, "prompt": key, "answer": "1", "response": NASTY, "correct": correct, "score": score}


def test_gained_and_lost_answers_are_counted_and_shown_first() -> None:
    marks = {"a": "WW", "b": "WR", "c": "RW", "d": "RR", "e": "WR"}
    before, after = ([outcome(key, correct=mark[side] == "R") for key, mark in marks.items()] for side in (0, 1))
    found = changes(before, list(reversed(after)), by_model=False, seed=0)
    assert found["counts"] == {"wrong → right": 2, "right → wrong": 1, "both right": 1, "both wrong": 1}
    assert [(row["kind"], row["prompt"]) for row in found["shown"][:3]] == [
        ("wrong → right", "b"), ("wrong → right", "e"), ("right → wrong", "c"),
    ]  # fmt: skip
    assert {row["kind"] for row in found["shown"][3:]} == {"random: both right", "random: both wrong"}


def test_where_a_reward_model_judges_scores_rise_and_fall() -> None:
    before = [outcome("a", score=0.5), outcome("b", score=0.5), outcome("c", score=0.5)]
    after = [outcome("a", score=0.75), outcome("b", score=0.25), outcome("c", score=0.5)]
    found = changes(before, after, by_model=True, seed=0)
    assert found["counts"] == {"score rose": 1, "score fell": 1, "score unchanged": 1}
    assert found["shown"][0]["kind"] == "score rose, 0.50 to 0.75"


def test_the_page_of_samples_survives_what_models_write() -> None:
    changed = changes([outcome("a")], [outcome("a", correct=True)], by_model=False, seed=0)
    html = HTML(samples_document([{"why": "best", **sample(1.0, 3)}], changed, policy="policy/test@1"))
    assert "<img" not in html
    assert html.count("<li>") == 2 + 2  # the right answer of the sample is not known: no line
    assert "best: score 1.000, KL 0.500 nats, 3 tokens" in html
    assert "<strong>1</strong> wrong → right" in html


def test_only_the_reports_own_pictures_become_addresses_that_hold_them() -> None:
    shown = facts(changes=changes([outcome("a")], [outcome("a")], by_model=False, seed=0))
    text = report_text(shown, {EVALUATION: b"1", EPISODES: b"2"})
    assert "![PPO by episode](ppo.png)" in text.splitlines()
    page = with_pictures(text, {EPISODES: b"2"})
    assert "![PPO by episode](data:image/png;base64,Mg==)" in page.splitlines()
    assert "(evaluation.png)" not in page
    assert page.count("data:image") == 1  # the model's own words are not touched
    assert "![x](ppo.png)" in page


def test_the_policys_lineage_stands_as_it_is_in_a_block() -> None:
    tree = ["policy/test@1", "├── sft/test@1", "│   └── model/**b**```", "└── dataset/<b>@1"]
    html = HTML(report_text(facts(lineage=tree), {}))
    assert "<h2>What the policy came from</h2>" in html
    assert "├── sft/test@1\n│   └── model/**b**```\n└── dataset/&lt;b&gt;@1\n</code>" in html


def test_a_run_without_most_things_still_has_a_report() -> None:
    text = report_text(facts(evaluations={}, episodes=[], champion=None), {})
    assert "Champion now: none" in text
    assert "![" not in text


def test_the_gates_conditions_are_a_table_with_figure_what_is_asked_and_outcome_and_a_suites_name_is_words() -> None:
    conditions = (
        Condition("length", 1.25, 1.5, holds=True, told="times the incumbent's mean"),
        Condition("empty answers", 0.125, 0.01, holds=False, told="rise of the share"),
        Condition("<img src=x> | mine:suite", None, 0.05, holds=True, told="not measured: [a](b)"),
    )
    decision = facts().decision.model_copy(update={"promote": False, "conditions": conditions})
    text = report_text(facts(decision=decision), {})
    lines = text.splitlines()
    assert "| condition | figure | asked | outcome |" in lines
    assert "| length | 1.250 | at most 1.5 | holds |" in lines
    assert "| empty answers | 0.125 | at most 0.01 | **broken** |" in lines
    html = HTML(text)
    assert "<img" not in html
    assert "<a " not in html
    assert "<td>not measured</td>" in html
    assert "condition" not in report_text(facts(), {})


def test_the_kept_episode_is_marked_and_told() -> None:
    rows = [{"episode": at, "score": 0.5, "development": figure} for at, figure in enumerate((0.5, 0.75, 0.25))]
    lines = episode_tables(rows).splitlines()
    assert lines[0] == "| episode | development split |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| 1", "| 2 (kept)", "| 3"]
    metrics = {"episodes": 3, "planned_episodes": 6, "kept_episode": 2, "development": 0.75, "stopped": "KL | was high"}
    told = stage_figures(
        StageResult(stage="ppo", uri="policy/a@1", digest="", reused=False, seconds=1, metrics=metrics)
    )
    assert "3 episodes of 6, as a night's budget ended, stopped: KL" in told
    assert "the policy is of episode 2 (0.750 on the development split)" in told
