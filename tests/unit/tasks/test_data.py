"""The dataset of a run: made once for the same content, refused before it is stored, shown with its report."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from flows.presets import draft_of, resolve
from infra.artifacts import ArtifactRef, Manifest, open_default_store
from rlhf_core.config import ClusterConfig, PipelineConfig
from rlhf_core.data import problems_from_jsonl
from rlhf_core.data.preparing import SOURCES
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.models import working_memory
from rlhf_core.models.memory import MachineMemory
from rlhf_core.models.working_memory import LongestRow
from tasks import data as data_tasks
from tasks.data import SPLITS, check_data, check_rows_fit, prepare_data, settled, with_data
from tasks.progress import telling
from tasks.stages import stage_result
from tests.tiny_llama import write_tiny_llama
from tests.unit.data.read_sets import CHATML, SIZES
from tests.unit.tasks import data_files
from tests.unit.tasks.data_files import write

SMALL = data_files.SMALL | {"evaluation.max_new_tokens": 40}
NO_ANSWERS = {"ppo.reward": {"verifier": 0.0, "reward_model": 1.0}, "evaluation.judge": "reward_model"}
ROWS = {
    "problems": [{"question": f"What is {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(40)],
    "prompts": [{"prompt": f"Tell me of {n}."} for n in range(40)],
    "demonstrations": [{"instruction": f"Say {n}.", "input": "", "output": f"I say {n}."} for n in range(40)],
    "preferences": [{"prompt": f"Ask {n}", "chosen": f"Kind {n}.", "rejected": "Rude."} for n in range(40)],
}


def preset(model: Path, **changes: Any) -> PipelineConfig:
    return resolve("quickstart", model=str(model), overrides=SMALL | changes)


@pytest.mark.parametrize("role", ROWS)
def test_the_parameter_data_takes_a_set_of_any_role(model: Path, tmp_path: Path, role: str) -> None:
    path = write(tmp_path / f"{role}.jsonl", ROWS[role])
    config = with_data(preset(model), path)
    assert [source.path for source in getattr(config.data, role)] == [path]
    assert (config.data.task, config.data.task_parameters) == (None, {})


GSM8K = [{"question": f"What is {n} and {n}?", "answer": f"{n}+{n}=<<1>>\n#### {2 * n}"} for n in range(40)]


@pytest.mark.parametrize(
    ("name", "rows", "role"),
    [
        ("gsm8k", GSM8K, "demonstrations"),
        ("gsm8k", [{"prompt": row["question"], "answer": "1"} for row in GSM8K], "problems"),  # of no such form
        ("hh-rlhf", ROWS["preferences"], "preferences"),
        ("quickstart", GSM8K, "problems"),  # in place of the task
    ],
)
def test_the_parameter_data_keeps_the_presets_role_where_it_has_one_alone(
    tmp_path: Path, name: str, rows: list[dict[str, Any]], role: str
) -> None:
    path = write(tmp_path / "train.jsonl", rows)
    data = with_data(resolve(name), path).data
    assert {each: [source.path for source in getattr(data, each)] for each in SOURCES if getattr(data, each)} == {
        role: [path]
    }
    assert data.verifier == ("gsm8k_reward_fn" if name == "gsm8k" else None)


def test_a_gsm8k_run_takes_one_file_for_everything(model: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "train.jsonl", GSM8K)
    small = {key: value for key, value in SMALL.items() if key != "template"} | {
        "template.stop": [],
        "ppo.max_new_tokens": 300,
        "evaluation.max_new_tokens": 300,
        "sft.max_length": 300,
    }
    config = with_data(resolve("gsm8k", model=str(model), overrides=small), rows)
    made = prepare_data.fn(config, None, reads=SPLITS)  # type: ignore[attr-defined]
    store = open_default_store()
    held_out = problems_from_jsonl(store.read_bytes(store.resolve(made.uri), "evaluation.jsonl"))
    assert len(held_out) == SIZES["evaluation"]
    assert all(str(each.demonstration).startswith("<think>") and each.answer for each in held_out)


@pytest.mark.parametrize("role", ROWS)
def test_a_set_becomes_a_dataset_with_its_report(model: Path, tmp_path: Path, role: str) -> None:
    config = with_data(preset(model, **NO_ANSWERS), write(tmp_path / f"{role}.jsonl", ROWS[role]))
    made = prepare_data.fn(config, None, reads=("ppo", "evaluation"))  # type: ignore[attr-defined]
    store = open_default_store()
    manifest = store.resolve(made.uri)
    held = {entry.path for entry in manifest.files}
    wanted = {f"{name}.jsonl" for name in SPLITS} | {"report.md", "report.json", "rejected.jsonl"}
    assert held == wanted | ({"pairs.jsonl"} if role == "preferences" else set())
    facts = json.loads(store.read_bytes(manifest, "report.json"))
    assert facts["splits"]["ppo"]["rows"] == SIZES["ppo"]
    assert made.metrics["problems_evaluation"] == SIZES["evaluation"]
    again = with_data(config, made.uri)
    assert again.data == config.data
    check_data.fn(again, made.parent, reads=("ppo", "evaluation"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", ["demonstrations", "preferences"])
def test_the_longest_rows_that_a_stage_learns_from_must_fit(
    model: Path, tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_data(preset(model, **NO_ANSWERS), write(tmp_path / f"{role}.jsonl", ROWS[role]))
    made = prepare_data.fn(config, None, reads=("ppo", "evaluation"))  # type: ignore[attr-defined]
    seen: dict[str, LongestRow] = {}

    def judge(_config: PipelineConfig, stage: str, _size: object, row: LongestRow) -> str:
        seen[stage] = row
        return ""

    with monkeypatch.context() as patched:
        patched.setattr(working_memory, "check_working_memory", judge)
        check_rows_fit.fn(config, made.parent, ("sft", "reward_model", "ppo"))  # type: ignore[attr-defined]
    assert seen["ppo"].response == 0
    # one token is one byte, and a stop token ends a response
    if role == "preferences":
        assert seen["reward_model"].response == len("Kind 39.") + 1
    else:
        assert seen["sft"].response == len("I say 39.") + 1
    check_rows_fit.fn(config, made.parent, ("sft",))  # type: ignore[attr-defined]  # by what this process knows
    monkeypatch.setattr(data_tasks, "_found_fit", set())
    monkeypatch.setattr(working_memory, "machine_memory", lambda: MachineMemory(10**9))
    with pytest.raises(ModelError, match=r"the stage sft on .* needs about .* programs"):
        check_rows_fit.fn(config, made.parent, ("sft",))  # type: ignore[attr-defined]
    elsewhere = config.model_copy(
        update={"ppo": config.ppo.model_copy(update={"cluster": ClusterConfig(address="a:1")})}
    )
    check_rows_fit.fn(elsewhere, made.parent, ("ppo",))  # type: ignore[attr-defined]


def test_another_model_in_the_same_directory_brings_its_own_tokenizer(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model")
    before = data_tasks._tokenizer(directory, "one digest")
    assert data_tasks._tokenizer(directory, "one digest") is before
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "a"}))
    assert data_tasks._tokenizer(directory, "another digest").eos_token == "a"
    assert before.eos_token != "a"


def test_a_dataset_is_found_again_by_content_not_by_path(model: Path, tmp_path: Path) -> None:
    prepare = prepare_data.fn  # type: ignore[attr-defined]
    one = with_data(preset(model), write(tmp_path / "one.jsonl", ROWS["problems"]))
    same = with_data(preset(model), write(tmp_path / "same.jsonl", ROWS["problems"]))
    other = with_data(preset(model), write(tmp_path / "other.jsonl", ROWS["problems"][1:]))
    longer = with_data(preset(model, **{"sft.max_length": 300}), one.data.problems[0].path)
    first = prepare(one, None, reads=SPLITS)
    assert (first.reused, prepare(same, None, reads=SPLITS).digest) == (False, first.digest)
    assert prepare(same, None, reads=SPLITS).reused
    assert not prepare(other, None, reads=SPLITS).reused
    assert not prepare(longer, None, reads=SPLITS).reused, "the limits say what is left out"


def test_what_a_run_could_not_use_is_refused_before_anything_is_stored(model: Path, tmp_path: Path) -> None:
    config = with_data(preset(model), write(tmp_path / "p.jsonl", ROWS["prompts"]))
    with pytest.raises(DataError, match=r"ppo\.reward\.verifier"):
        prepare_data.fn(config, None, reads=("ppo",))  # type: ignore[attr-defined]
    assert not list(open_default_store().list())


def test_rejected_rows_are_dropped_where_they_may_be_and_kept_by_name(model: Path, tmp_path: Path) -> None:
    rows = [*ROWS["problems"], {"question": "And?"}, {"question": " ", "answer": "1"}]
    path = write(tmp_path / "p.jsonl", rows)
    with pytest.raises(DataError, match=r"row 41 of .*p\.jsonl"):
        prepare_data.fn(with_data(preset(model), path), None, reads=SPLITS)  # type: ignore[attr-defined]
    config = with_data(preset(model, **{"data.bad_rows": "drop"}), path)
    made = prepare_data.fn(config, None, reads=SPLITS)  # type: ignore[attr-defined]
    body = open_default_store().read_bytes(open_default_store().resolve(made.uri), "rejected.jsonl").decode()
    assert [json.loads(line)["where"].split()[:2] for line in body.splitlines()] == [["row", "41"], ["row", "42"]]
    assert made.metrics["rejected"] == 2


def test_keys_of_messages_that_the_model_is_not_shown_are_named_in_the_log_and_on_the_page(
    model: Path, tmp_path: Path
) -> None:
    def row(number: int) -> dict[str, Any]:
        said = {"role": "assistant", "content": f"Kind {number}.", "thinking": "Hm."}
        return {"prompt": f"Ask {number}", "chosen": [said], "rejected": [{**said, "content": "Rude."}]}

    path = write(tmp_path / "p.jsonl", [row(number) for number in range(40)])
    lines: list[str] = []
    with telling(lines.append):
        made = prepare_data.fn(with_data(preset(model, **NO_ANSWERS), path), None, reads=("ppo",))  # type: ignore[attr-defined]
    told = "'thinking' of 80 messages (template.prompt shows the contents of messages alone)"
    assert any(line.endswith(f"left out of the messages of preferences: {told}") for line in lines)
    store = open_default_store()
    page = store.read_bytes(store.resolve(made.uri), "report.md").decode()
    assert "* `thinking`: 80; template.prompt shows the contents of messages alone" in page


def test_what_the_linter_finds_is_told_each_night_and_gets_a_key_of_its_own_where_it_is_asked_for(
    model: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", [*ROWS["problems"], {"question": "[INST] And 9? [/INST]", "answer": "#### 9"}])
    reused, lines = [], list[str]()
    with telling(lines.append):
        for overrides in ({}, {}, {"data.lint": "warn"}, {"data.lint.template": "drop"}):
            made = prepare_data.fn(with_data(preset(model, **overrides), path), None, reads=SPLITS)  # type: ignore[attr-defined]
            reused.append(made.reused)
    assert reused == [False, True, True, False]
    told = [line for line in lines if "lint template: 1 of 41 rows of data.problems hold the marks" in line]
    assert len(told) == len(reused)
    assert made.metrics["rejected"] == 1


def test_a_set_that_is_not_there_is_one_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl does not exist"):
        with_data(preset(model), str(tmp_path / "nothing.jsonl"))


def test_a_model_without_a_chat_template_needs_a_template(tmp_path: Path) -> None:
    from tests.tiny_llama import tiny_tokenizer

    directory = write_tiny_llama(tmp_path / "bare")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)
    config = with_data(
        resolve("quickstart", model=str(directory), overrides=SMALL | {"template.prompt": None, "template.stop": None}),
        write(tmp_path / "p.jsonl", ROWS["problems"]),
    )
    with pytest.raises(ConfigError, match=r"no chat template.*template\.prompt"):
        prepare_data.fn(config, None, reads=SPLITS)  # type: ignore[attr-defined]


OWN = [{"question": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(300)]
OWN_PAIRS = [
    {"prompt": f"Ask {n}", "chosen": f"Kind {n}, as it should be.", "rejected": f"Rude {n}."} for n in range(300)
]


TEMPLATE = {"template": {"prompt": CHATML, "chat_template": None}}  # one of the presets has a chat template


def begun(preset: str, model: Path, path: str, reads: tuple[str, ...] = SPLITS, **overrides: Any) -> PipelineConfig:
    """What a flow begins with, data of one's own stored: as `flows.begin`, without Prefect."""
    draft = draft_of(preset, model=str(model), data=path, overrides=overrides)
    config = with_data(draft.config, path)
    dataset = prepare_data.fn(config, path, reads=reads, sizes=draft.sizes)  # type: ignore[attr-defined]
    if dataset.reused:
        check_data.fn(config, dataset.parent, reads=reads)  # type: ignore[attr-defined]
    found = settled(config, draft.sizes, dataset, path, reads=reads)
    return PipelineConfig.model_validate(found.model_dump())  # its relations hold


@pytest.mark.parametrize(
    ("preset", "rows", "overrides", "sizes"),
    [
        # by their hashes: a tenth for the evaluation, the rest as 1024 to 256 to 640
        ("quickstart", OWN, {}, {"sft": 140, "preferences": 39, "ppo": 92, "evaluation": 29}),
        # the size is a limit, and the share is set beside it; who may be held out grows, and others may be learnt
        (
            "quickstart",
            OWN,
            {"data.splits.evaluation": 100, "data.heldout_fraction": 0.4},
            {"sft": 85, "preferences": 19, "ppo": 62, "evaluation": 100},
        ),
        # 96 + 192 prompts and 400 pairs are wanted
        ("hh-rlhf", OWN_PAIRS, {}, {"sft": 35, "preferences": 64, "ppo": 84, "evaluation": 30}),
    ],
)
def test_a_first_run_on_300_rows_of_ones_own_begins(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    preset: str,
    rows: list[dict[str, Any]],
    overrides: dict[str, Any],
    sizes: dict[str, int],
) -> None:
    caplog.set_level("INFO")
    lengths = {"evaluation.max_new_tokens": 40, **TEMPLATE}
    path = write(tmp_path / "mine.jsonl", rows)
    first = begun(preset, model, path, **lengths, **overrides)
    assert first.data.splits.model_dump() == {**sizes, "development": 0}
    assert f"data.splits.ppo {sizes['ppo']} (not " in caplog.text
    again = begun(preset, model, path, **lengths, **overrides)
    assert again == first
    assert len(open_default_store().list("dataset")) == 1
    [stored] = open_default_store().list("dataset")
    told = draft_of(preset, model=str(model), data=stored.ref.uri, overrides={**lengths, **overrides})
    named = settled(
        with_data(told.config, stored.ref.uri), told.sizes, stage_result("data", stored, reused=True), stored.ref.uri,
        reads=SPLITS,
    )  # fmt: skip
    assert named.ppo == first.ppo, "a flow that is handed the dataset has the same sizes"


def test_sizes_that_the_user_set_are_kept_or_all_told_at_once_with_what_works(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", OWN)
    asked = {"data.splits.ppo": 300, "ppo.train_batch_size": 48, "ppo.prompts_per_episode": 64}
    lengths = {"evaluation.max_new_tokens": 8, "sft.max_length": 30, **TEMPLATE}
    with pytest.raises(DataError, match=r"^4 things stand in the way.*with these overrides it works") as refused:
        begun("quickstart", model, path, **asked, **lengths)
    told = str(refused.value)
    for part in (
        "mine.jsonl) has 300 different prompts that can be used, of which by their hashes ppo may have ",
        "train_batch_size is 48",
        "sft.max_length = 30",
        "max_new_tokens",
    ):
        assert part in told
    assert not open_default_store().list("dataset")
    offered = json.loads(told[told.rindex(": {") + 2 :])
    config = begun("quickstart", model, path, **asked | lengths | offered)
    assert (config.ppo.prompts_per_episode * config.ppo.samples_per_prompt) % config.ppo.train_batch_size == 0
    assert begun("quickstart", model, path, **asked | lengths | offered) == config


BARE = {**TEMPLATE, "evaluation.max_new_tokens": 40}
JUDGED_BY_MODEL = {"ppo.reward.verifier": 0, "ppo.reward.reward_model": 1, "evaluation.judge": "reward_model"}


@pytest.mark.parametrize(
    ("preset", "rows", "reads", "overrides", "told"),
    [
        (
            "hh-rlhf",
            OWN_PAIRS[:3],
            SPLITS,
            JUDGED_BY_MODEL,
            r"has 3 different prompts .* evaluation may have 0 \(needs 2\), .*; give more$",
        ),
        (
            "quickstart",
            OWN[:5],
            SPLITS,
            {"ppo.num_trainers": 4},
            r"has 5 .* evaluation may have 0 \(needs 2\), ppo may have 2 \(needs 4\); give more$",
        ),
        (
            "quickstart",
            OWN[:5],
            ("ppo",),
            {"sft.max_length": 30, "data.too_long": "drop"},
            r"0 different.*5 are left out by sft\.max",
        ),
        (
            "quickstart",
            OWN,
            SPLITS,
            {"data.splits.evaluation": 0},
            r"evaluation is 0, but this run reads that split and needs at least 2; with",
        ),
    ],
)
def test_too_few_rows_are_told_with_what_is_needed(
    model: Path,
    tmp_path: Path,
    preset: str,
    rows: list[dict[str, Any]],
    reads: tuple[str, ...],
    overrides: dict[str, Any],
    told: str,
) -> None:
    path = write(tmp_path / "mine.jsonl", rows)
    with pytest.raises(DataError, match=told):
        begun(preset, model, path, reads, **BARE | overrides)
    assert not open_default_store().list("dataset")


def test_sft_alone_runs_whatever_ppo_would_need(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", OWN)
    asked = {"data.splits.ppo": 2, "ppo.num_trainers": 4}
    assert begun("quickstart", model, path, ("sft",), **BARE | asked).data.splits.sft > 100
    few = write(tmp_path / "few.jsonl", OWN[:5])
    assert begun("quickstart", model, few, ("sft",), **BARE | {"ppo.num_trainers": 4}).data.splits.sft >= 1
    pairs = write(tmp_path / "pairs.jsonl", OWN_PAIRS)
    alone = begun("hh-rlhf", model, pairs, ("sft",), **BARE | {"data.splits.sft": 10**6})
    assert alone.data.splits.sft == 269, "nearly all that is not held out"


def test_a_flow_alone_learns_what_it_learns_in_the_whole_chain(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", OWN[:131])
    asked = {"ppo.prompts_per_episode": 128, "ppo.reward.reward_model": 0}
    whole = begun("quickstart", model, path, **BARE)
    sft = begun("quickstart", model, path, ("sft",), **BARE | asked)
    with pytest.raises(DataError, match=r"131 different prompts .*ppo may have 38 \(needs 128\)"):
        begun("quickstart", model, path, ("ppo",), **BARE | asked)
    assert sft.data.splits.sft == whole.data.splits.sft
    one, other = (set(learnt("sft", stored)) for stored in open_default_store().list("dataset"))
    assert one == other


def learnt(split: str, stored: Manifest) -> list[str]:
    return [each.prompt for each in problems_from_jsonl(open_default_store().read_bytes(stored, f"{split}.jsonl"))]


def test_a_stored_datasets_splits_are_not_offered_for_change(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", OWN)
    small = {"data.splits.ppo": 30, "ppo.prompts_per_episode": 30, "data.splits.sft": 40, "data.splits.preferences": 20}
    begun("quickstart", model, path, **BARE | small)
    [stored] = open_default_store().list("dataset")
    with pytest.raises(ConfigError, match=r"works: \{\"ppo\.prompts_per_episode\": 30\}$"):
        named(stored, model, **BARE | {"ppo.prompts_per_episode": 64})
    assert named(stored, model, **BARE | {"ppo.prompts_per_episode": 30}).ppo.prompts_per_episode == 30
    with pytest.raises(
        ConfigError, match=r"dataset/quickstart@1 does not suit this run: data\.splits\.ppo has 30 .* at least 64"
    ):
        named(stored, model, **BARE | {"ppo.num_trainers": 64})


def named(stored: Manifest, model: Path, **overrides: Any) -> PipelineConfig:
    draft = draft_of("quickstart", model=str(model), data=stored.ref.uri, overrides=overrides)
    result = stage_result("data", stored, reused=True)
    return settled(with_data(draft.config, stored.ref.uri), draft.sizes, result, stored.ref.uri, reads=SPLITS)


def test_an_offer_says_where_it_does_not_suffice(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": f"Tell me of {n}."} for n in range(300)])
    bare = BARE | {"ppo.reward": {"verifier": 1.0, "reward_model": 0.0}}
    with pytest.raises(DataError, match=r"a reward model needs pairs.*with these overrides it works \(where"):
        begun("quickstart", model, path, ("ppo", "evaluation"), **bare)


def test_a_stage_alone_takes_every_row_and_minds_no_key_of_ppo(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", OWN)
    every = {"data.heldout_fraction": 0, "data.splits.preferences": 0, "data.splits.ppo": 0}
    asked = {**every, "data.splits.sft": 300, "ppo.train_batch_size": 48, "ppo.prompts_per_episode": 64}
    bare = {**TEMPLATE, "evaluation.max_new_tokens": 40}
    alone = begun("quickstart", model, path, ("sft",), **asked, **bare)
    splits = {"sft": 300, "preferences": 0, "ppo": 0, "evaluation": 0, "development": 0}
    assert alone.data.splits.model_dump() == splits
    assert begun("quickstart", model, path, ("sft",), **asked, **bare).data == alone.data
    with pytest.raises(DataError, match=r"evaluation may have 0 \(needs 2\).*raise data\.heldout_fraction \(0\)"):
        begun("quickstart", model, path, **asked, **bare)


def test_each_run_asks_the_next_held_out_problems_and_one_that_is_started_again_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(60)])
    splits = {"data.splits.evaluation": 4, "data.rotate_evaluation": True, "data.heldout_fraction": 0.2}
    config = with_data(preset(model, **splits), path)
    store = open_default_store()

    def night(run: str, reads: tuple[str, ...] = SPLITS, **ended: bool) -> tuple[str, ...]:
        monkeypatch.setattr("tasks.context.root_flow_run", lambda: run)
        made = prepare_data.fn(config, None, reads=reads)
        if ended:
            parents = [ArtifactRef(made.uri, made.digest)]
            store.commit("run", config.name, {"report.md": run.encode()}, parents=parents, metrics=ended, key=run)
        rows = problems_from_jsonl(store.read_bytes(store.resolve(made.uri), "evaluation.jsonl"))
        return tuple(row.key for row in rows)

    nights = [night(f"run-{number}", unfinished=False) for number in range(12)]
    pool = {key for asked in nights for key in asked}
    whole = len(pool) // 4
    assert len({key for asked in nights[:whole] for key in asked}) == 4 * whole  # none twice before all were asked
    assert all(set(one).isdisjoint(other) for one, other in itertools.pairwise(nights))
    assert night("run-3") == nights[3]
    assert not [message for message in caplog.messages if "held-out pool has" in message]
    night("alone", reads=("sft",))  # a stage alone moves nothing
    order = list(dict.fromkeys(key for asked in nights for key in asked))
    begins = 12 * 4 % len(order)
    due = tuple((order + order)[begins : begins + 4])
    assert night("failed") == due
    assert night("at-its-budget", unfinished=True) == due
    assert night("run-12", unfinished=False) == due
    assert night("run-13") != due
