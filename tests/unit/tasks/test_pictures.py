"""The run's pictures: what is drawn, with which words, and how heavy it is."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.pictures.figures import draw_episodes, draw_evaluations, draw_reward_model, draw_sft
from tasks.pictures.panels import CONSTANT, START, curves, seconds_by_phase
from tasks.pictures.style import png
from tests.unit.tasks.episodes import WIDTH, episode, size

LARGEST_BYTES = 100_000


def axes_of(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_curves_name_their_quantities_with_units() -> None:
    figure = draw_episodes([episode(at) for at in range(3)])
    labels = {title: (axes.get_xlabel(), axes.get_ylabel()) for title, axes in axes_of(figure).items()}
    assert labels == {
        "Score": ("episode", "mean per response"),
        "Verifier's score": ("episode", "mean, 1 is right"),
        "Right, given the form": ("episode", "share of well formed"),
        "Well formed": ("episode", "share of samples"),
        "KL from the start": ("episode", "nats per response"),
        "Length of responses": ("episode", "tokens"),
        "Entropy": ("episode", "nats per token"),
        "Clipped by the trust region": ("episode", "share of tokens"),
        "Explained by the critic": ("episode", "share of variance"),
        "Where the time went": ("episode", "seconds"),
    }


def test_curves_are_a_png_of_the_width_and_weight_that_a_page_bears() -> None:
    rows = [episode(at, reward=(at * 7 % 11) / 11) for at in range(120)]
    data = png(draw_episodes(rows))
    assert size(data)[0] == WIDTH
    assert len(data) < LARGEST_BYTES


def test_the_same_figures_give_the_same_bytes() -> None:
    first, second = (png(draw_evaluations({"ppo": {"accuracy": 0.5}})) for _ in range(2))
    assert first == second


def test_the_start_the_champion_and_the_best_constant_answer_are_lines_to_compare_with() -> None:
    start = {"accuracy": 0.5, "score": 0.5, "well_formed": 0.9, "accuracy_given_form": 0.55, "constant_accuracy": 0.125}
    compared = {"SFT start": start, "champion": {"accuracy": 0.625, "score": 0.75}}  # one that earned parts of a point
    figure = draw_episodes([episode(0), episode(1)], evaluations=compared)
    axes = axes_of(figure)

    def levels(title: str) -> list[float]:
        across = [line for line in axes[title].lines if np.ravel(line.get_xdata()).tolist() == [0, 1]]
        return [float(np.ravel(line.get_ydata())[0]) for line in across]

    assert levels("Verifier's score") == [0.5, 0.75, 0.125]
    assert levels("Right, given the form") == [0.55]
    assert levels("Well formed") == [0.9]
    assert levels("KL from the start") == [0.0]
    assert levels("Length of responses") == [15.0]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == [
        "95% interval over the episode's samples", START, "SFT start, greedy", "champion, greedy", CONSTANT,
    ]  # fmt: skip


def test_shares_and_the_reward_have_the_interval_of_each_episodes_samples() -> None:
    panels = {panel.title: panel for panel in curves([episode(0), episode(1)], evaluations={})}
    share = panels["Verifier's score"].lines[0]
    # Wilson, 16 of 64, z 1.96: centre (0.25 + 3.8416/128) / (1 + 3.8416/64), half width 0.1036
    assert [round(end, 3) for end in (share.low[0], share.high[0])] == [0.160, 0.368]
    formed = panels["Right, given the form"].lines[0]  # 16 of the 32 well formed
    assert [round(end, 3) for end in (formed.low[0], formed.high[0])] == [0.336, 0.664]
    score = panels["Score"].lines[0]
    # mean 0.5, standard deviation 0.8, 64 samples: 0.5 +- 1.96 * 0.8 / 8
    assert [round(end, 3) for end in (*score.low, *score.high)] == [0.304, 0.304, 0.696, 0.696]
    rows = [{"score": 0.5, "samples": 64.0}, {"score": 0.5, "samples": 1.0, "score_std": 0.0}]
    unknown = curves(rows, evaluations={})[0].lines[0]
    assert all(isnan(end) for end in (*unknown.low, *unknown.high))


def test_parts_of_a_point_have_the_interval_of_their_own_standard_deviation() -> None:
    # half of the verdicts are 0.4 and half 0.6, 64 of them: 0.5 +- 1.96 * 0.1008 / 8, not Wilson's 0.5 +- 0.119
    rows = [episode(0, verifier=0.5, verifier_std=0.1008), episode(1, verifier=1.0, verifier_std=0.0)]
    line = next(panel for panel in curves(rows, evaluations={}) if panel.title == "Verifier's score").lines[0]
    assert [round(end, 3) for end in (line.low[0], line.high[0])] == [0.475, 0.525]
    # Wilson, 64 of 64: n / (n + z^2)
    assert [round(end, 3) for end in (line.low[1], line.high[1])] == [0.943, 1.0]


def test_what_was_not_measured_has_no_panel() -> None:
    bare = {"episode": 0, "score": 0.5, "verifier": 0.0, "kl": 0.0, "explained_variance": 0.0, "critic_loss": 0.0}
    assert [panel.title for panel in curves([bare], evaluations={})] == ["Score", "KL from the start"]


def test_sources_of_reward_are_told_apart() -> None:
    rows = [episode(0, **{"raw/reward_model": 2.0, "reward_share_verifier": 0.75, "reward_share_reward_model": 0.25})]
    panels = {panel.title: panel for panel in curves(rows, evaluations={})}
    assert panels["Score of reward model"].lines[0].values == (2.0,)
    shares = panels["Share of reward's variance"]
    assert {line.name: line.values for line in shares.lines} == {"verifier": (0.75,), "reward_model": (0.25,)}
    assert (shares.floor, shares.ceiling) == (0.0, 1.0)


def test_what_abstained_has_a_panel_and_widens_the_intervals() -> None:
    rows = [episode(0, abstained=0.0), episode(1, abstained=0.5)]
    panels = {panel.title: panel for panel in curves(rows, evaluations={})}
    assert panels["Abstained"].lines[0].values == (0.0, 0.5)
    (formed,) = panels["Well formed"].lines
    assert [round(end, 3) for end in (formed.low[1], formed.high[1])] == [0.336, 0.664]  # Wilson, 16 of 32
    assert "Abstained" not in {panel.title for panel in curves(rows[:1], evaluations={})}


def test_what_overlaps_is_shown_where_making_and_learning_overlap() -> None:
    overlap = {"staleness_max": 2.0, "queue_depth": 24.0, "idle_trainer": 0.25, "idle_makers": 0.0}
    rows = [episode(0, staleness=0.0, **overlap), episode(1, staleness=1.5, **overlap), episode(2)]
    figure = draw_episodes(rows)
    shown = {panel.title: panel for panel in curves(rows, evaluations={})}
    for title, unit, lines in (
        ("Age of the samples", "versions", {"mean": (0.0, 1.5), "oldest": (2.0, 2.0)}),
        ("Samples ready to learn from", "samples", {"queue_depth": (24.0, 24.0)}),
        ("Idle", "share of the time", {"trainer": (0.25, 0.25), "makers": (0.0, 0.0)}),
    ):
        assert axes_of(figure)[title].get_ylabel() == unit
        assert {line.name: line.values[:2] for line in shown[title].lines} == lines
        assert all(isnan(line.values[2]) for line in shown[title].lines)
    assert (shown["Idle"].floor, shown["Idle"].ceiling) == (0.0, 1.0)
    in_turns = [episode(at, **{**overlap, "staleness": 0.0}) for at in range(2)]
    assert "Idle" not in {panel.title for panel in curves(in_turns, evaluations={})}


def test_seconds_are_stacked_in_the_order_of_the_phases() -> None:
    rows = [{"seconds_learn": 4.0, "seconds_zeta": 1.0, "seconds_generate": 2.0}, {"seconds_learn": 3.0}]
    assert list(seconds_by_phase(rows).items()) == [
        ("generate", (2.0, 0.0)), ("learn", (4.0, 3.0)), ("zeta", (1.0, 0.0)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [[], [episode(0)], [episode(0, reward=float("nan"))], [{"episode": 0}], [episode(at, kl=0.0) for at in range(3)]],
    ids=["empty", "single", "nan", "bare", "constant"],
)
def test_little_or_constant_data_is_drawn(rows: list[dict[str, Any]]) -> None:
    assert size(png(draw_episodes(rows)))[0] == WIDTH


def test_a_single_episode_is_a_point_in_the_middle() -> None:
    axes = axes_of(draw_episodes([episode(0)]))["Score"]
    assert axes.get_xlim() == (0.5, 1.5)
    assert axes.lines[-1].get_marker() == "o"
    assert [tick for tick in axes.get_xticks() if 0.5 < tick < 1.5] == [1.0]


def test_an_explained_variance_far_below_zero_does_not_flatten_the_rest() -> None:
    axes = axes_of(draw_episodes([episode(0, explained_variance=-40.0), episode(1)]))["Explained by the critic"]
    assert axes.get_ylim()[0] == -1.0
    assert axes.get_ylabel() == "share (axis ends at -1)"


def test_held_out_scores_stand_with_their_intervals_beside_the_best_constant_answer() -> None:
    figures = {"low": 0.4, "high": 0.6, "problems": 400, "constant_accuracy": 0.125}
    figure = draw_evaluations({"sft": {"accuracy": 0.5, **figures}, "ppo": {"accuracy": 0.75, **figures}})
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "Greedy answers to 400 held-out problems"
    assert axes.get_xlabel() == "share of right answers"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["SFT", "PPO"]
    assert [text.get_text() for text in axes.texts] == ["0.500", "0.750"]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["95% interval", "best constant answer, 0.125"]
    assert size(png(figure))[0] == WIDTH


def test_scores_of_a_reward_model_are_drawn_in_its_unit() -> None:
    metrics = {"judge": "reward_model", "score": -0.5, "low": -0.75, "high": -0.25, "problems": 10}
    axes = draw_evaluations({"ppo": metrics}).axes[0]
    assert axes.get_xlabel() == "mean score, standard deviations of the reward model"
    assert size(png(draw_evaluations({})))[0] == WIDTH


def test_training_curves_name_their_units_and_show_what_was_held_out() -> None:
    rows = [{"step": at, "loss": 1 / at, "lr": 1e-5} for at in range(1, 41)]
    rows[-1]["heldout_loss"] = 0.25
    figure = draw_sft(rows)
    assert figure is not None
    axes = axes_of(figure)
    assert axes["Loss of SFT"].get_ylabel() == "nats per token"
    assert axes["Learning rate of SFT"].get_ylabel() == "per step"
    legend = axes["Loss of SFT"].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["each step", "mean of 3 steps", "held out"]
    assert draw_sft([]) is None


def test_a_reward_model_shows_its_calibration_and_scores_with_or_without_its_steps() -> None:
    bins = [{"low": 0.5, "high": 0.55, "pairs": 4, "confidence": 0.52, "correct": 0.625}, {"pairs": 0}]
    metrics = {
        "calibration_bins": bins,
        "score_histogram": {"edges": [0.0, 0.5, 1.0], "chosen": [1, 3], "rejected": [3, 1]},
    }
    older = draw_reward_model([], metrics)
    assert older is not None
    assert set(axes_of(older)) == {"Calibration on held-out pairs", "Scores of held-out responses"}
    newer = draw_reward_model([{"step": 1, "loss": 0.7, "accuracy": 0.5}], metrics)
    assert newer is not None
    assert axes_of(newer)["Right in training"].get_ylabel() == "share of a batch's pairs"
    assert draw_reward_model([], {}) is None


def test_the_development_split_has_a_panel_whose_level_is_the_kept_episode() -> None:
    rows = [episode(0), episode(1, development=0.75), episode(2, development=0.5)]
    panel = next(each for each in curves(rows, evaluations={}) if each.title == "Development split")
    assert [str(value) for value in panel.lines[0].values] == ["nan", "0.75", "0.5"]
    assert [(each.name, each.value) for each in panel.references] == [("kept: episode 2", 0.75)]
