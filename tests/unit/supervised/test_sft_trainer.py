"""coati's SFT trainer: the numbers of `train_sft`, windows of batches, checkpoints, resuming to the bit."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, DataError, ModelError, TrainingError
from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.supervised.batches import as_masked, token_batch
from rlhf_core.supervised.sft import SFTTrainer, mean_token_loss
from tests.forked import exit_of
from tests.tiny_llama import tiny_llama
from tests.unit.coati.ppo_trainers import differences, first_difference

FP32 = torch.float32
EXAMPLES = [
    ([5, 6, 7], [10, 11, 2]),
    ([8], [12, 2]),
    ([5, 9], [13, 14, 15, 16, 2]),
    ([7, 7, 7, 7], [17, 2]),
    ([30, 31], [32, 2]),
    ([40], [41, 42, 43, 44, 2]),
    ([50, 51, 52], [53, 2]),
]
CASES = {"full": 0.0, "adapters with dropout": 0.3}


def collate(rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    return dict(token_batch([as_masked(row) for row in rows])._asdict())


def loader(batch_size: int = 1, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(EXAMPLES, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]


def trainer(case: str = "full", *, lr: float = 1e-3, booster: PlainBooster | None = None, **options: Any) -> SFTTrainer:
    model = tiny_llama(initializer_range=0.2)
    if case != "full":
        attach_lora(model, LoRAConfig(r=2, dropout=CASES[case]), seed=0)
    optimizer = AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=lr)
    booster = booster or PlainBooster()
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optim, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return SFTTrainer(model, booster, optim, scheduler, **options)


def weights(ours: SFTTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in ours.trained.model.named_parameters()}


def test_the_constructor_and_fit_are_coatis() -> None:
    parameters = inspect.signature(SFTTrainer).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == [
        ("max_epochs", 2), ("plugin", None), ("accumulation_steps", 8), ("apply_loss_mask", True), ("start_epoch", 0),
        ("save_interval", None), ("save_dir", None), ("coordinator", None),
    ]  # fmt: skip
    assert [p.name for p in parameters][:4] == ["model", "booster", "optim", "lr_scheduler"]
    assert [*inspect.signature(SFTTrainer.fit).parameters] == [
        "self", "train_dataloader", "eval_dataloader", "log_dir", "use_wandb",
    ]  # fmt: skip


def test_a_window_of_batches_is_one_minibatch_whose_loss_is_a_mean_over_its_tokens() -> None:
    ones, three = trainer(max_epochs=1, accumulation_steps=3), trainer(max_epochs=1, accumulation_steps=1)
    ones.fit(loader(1))
    three.fit(loader(3))
    assert [step["tokens"] for step in ones.history] == [10, 9, 2]  # 3 + 2 + 5, 2 + 2 + 5, 2: the last window is short
    for one, other in zip(ones.history, three.history, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["lr"] == other["lr"]
    assert [step["lr"] for step in ones.history] == [1e-3, 5e-4, 1e-3 / 3]


def test_a_bare_optimizer_of_torch_takes_the_same_steps() -> None:
    model = tiny_llama(initializer_range=0.2)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    bare = SFTTrainer(model, PlainBooster(), optimizer, scheduler, max_epochs=1, accumulation_steps=3)
    boosted = trainer(max_epochs=1, accumulation_steps=3, booster=PlainBooster(max_norm=None))
    for ours in (bare, boosted):
        ours.fit(loader(1))
    assert bare.history == boosted.history


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("form", ["loss_mask", "labels"])
def test_loss_masks_labels_and_either_padding_say_the_same(form: str, padding: str) -> None:
    batch = collate(EXAMPLES)
    if padding == "right":
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        for name in ("input_ids", "attention_mask", "loss_mask"):
            rows = [torch.roll(row, int(length)) for row, length in zip(batch[name], lengths, strict=True)]
            batch[name] = torch.stack(rows)
    del batch["position_ids"]
    if form == "labels":
        batch["labels"] = torch.where(batch.pop("loss_mask"), batch["input_ids"], -100)
    ours, usual = trainer(max_epochs=1), trainer(max_epochs=1)
    ours.fit([batch])
    usual.fit(loader(7))
    assert ours.history[0]["tokens"] == 21
    assert ours.history[0]["loss"] == pytest.approx(usual.history[0]["loss"], rel=1e-5)


def test_without_the_loss_mask_every_token_but_the_first_is_learnt() -> None:
    ours = trainer(max_epochs=1, apply_loss_mask=False)
    ours.fit(loader(7))
    assert ours.history[0]["tokens"] == sum(len(p) + len(r) - 1 for p, r in EXAMPLES)


def test_evaluation_measures_the_model_and_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = trainer("adapters with dropout", accumulation_steps=2)
    plain.fit(loader(2, shuffle=True))
    torch.manual_seed(5)
    measured = trainer("adapters with dropout", accumulation_steps=2)
    measured.fit(loader(2, shuffle=True), loader(3), log_dir=str(tmp_path))
    assert measured.history == plain.history
    [file] = tmp_path.glob("sft/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    last = [row for row in rows if "eval/loss" in row][-1]
    expected = mean_token_loss(
        measured.trained.model, [token_batch([as_masked(e)]) for e in EXAMPLES], autocast_dtype=FP32
    )
    assert last["eval/loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert last["eval/tokens"] == 21
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [step["loss"] for step in plain.history]
    assert not measured.trained.model.training


def test_dropout_is_active_in_training_and_in_training_alone() -> None:
    ours = trainer(max_epochs=1, accumulation_steps=2)
    modes: list[bool] = []
    ours.trained.model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    ours.fit(loader(3), loader(4))
    assert modes == [True] * 3 + [False] * 2


def resume(case: str, checkpoint: str, result: str) -> None:
    """What the other process does."""
    torch.manual_seed(99)
    ours = trainer(case, max_epochs=3, accumulation_steps=2)
    ours.load_checkpoint(checkpoint)
    ours.fit(loader(2, shuffle=True))
    save_file(weights(ours), f"{result}.safetensors")
    Path(f"{result}.json").write_text(json.dumps(ours.history))


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_going_on_from_the_middle_of_an_epoch_equals_not_having_stopped(case: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    straight = trainer(case, max_epochs=3, accumulation_steps=2, save_interval=3, save_dir=tmp_path)
    straight.fit(loader(2, shuffle=True))  # four batches, two steps, three epochs: six steps
    arguments = (case, str(tmp_path / "epoch-1_step-3"), str(tmp_path / "resumed"))
    if case == "full":
        resume(*arguments)
    else:
        assert exit_of(resume, *arguments) == 0
    history = json.loads((tmp_path / "resumed.json").read_text())
    resumed = load_file(tmp_path / "resumed.safetensors")
    said = f"{first_difference(straight.history[3:], history)} {differences(weights(straight), resumed)}".strip()
    assert not said, said


def test_checkpoints_have_coatis_layout_and_load_as_a_model(tmp_path: Path) -> None:
    ours = trainer(max_epochs=1, accumulation_steps=3, save_dir=str(tmp_path))
    ours.fit(loader(1))
    directory = tmp_path / "epoch-0_step-3"
    assert {path.name for path in directory.iterdir()} == {
        "modeling", "optimizer", "lr_scheduler", "running_states.json",
    }  # fmt: skip
    states = json.loads((directory / "running_states.json").read_text())
    assert states == {"epoch": 0, "step": 3, "sample_start_index": 7}
    loaded = AutoModelForCausalLM.from_pretrained(directory / "modeling")
    assert torch.equal(loaded.lm_head.weight, ours.trained.model.lm_head.weight)


def test_a_directory_of_checkpoints_may_be_called_like_one(tmp_path: Path) -> None:
    save_dir = tmp_path / "epoch-ends"
    trainer(max_epochs=1, accumulation_steps=4, save_dir=save_dir).fit(loader(1))
    ours = trainer()
    ours.load_checkpoint(save_dir)
    assert ours.step == 2


def test_one_checkpoint_may_be_named_and_a_damaged_or_strange_one_is_refused(tmp_path: Path) -> None:
    trainer(max_epochs=1, accumulation_steps=4, save_interval=1, save_dir=tmp_path).fit(loader(1))
    ours = trainer()
    ours.load_checkpoint(tmp_path / "epoch-0_step-1")
    assert (ours.step, ours.start_epoch) == (1, 0)
    with pytest.raises(
        ModelError, match=r"\[20\] as numbers of weights in the optimizer's groups, but this run has \[28\]"
    ):
        trainer("adapters with dropout").load_checkpoint(tmp_path)
    file = next((tmp_path / "epoch-0_step-2" / "modeling").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ModelError, match="is not whole"):
        trainer().load_checkpoint(tmp_path / "epoch-0_step-2")
    with pytest.raises(ModelError, match="holds no whole checkpoint"):
        trainer().load_checkpoint(tmp_path / "nowhere")


def test_a_loss_that_is_not_finite_keeps_the_minibatch_and_the_weights(tmp_path: Path) -> None:
    ours = trainer(save_dir=tmp_path, accumulation_steps=2)
    ours.trained.model.model.norm.weight.data.fill_(float("nan"))
    before = weights(ours)
    with pytest.raises(
        TrainingError, match=r"language model's loss is nan.*the minibatch is kept in .*failed-batch"
    ) as caught:
        ours.fit(loader(2))
    kept = load_file(str(caught.value).rsplit(" ", 1)[1])
    assert torch.equal(kept["0.input_ids"], collate(EXAMPLES[:2])["input_ids"])
    assert kept.keys() >= {"1.input_ids", "1.loss_mask"}
    assert all(torch.equal(weight, before[name]) or weight.isnan().all() for name, weight in weights(ours).items())
    assert not ours.trained.model.training


def test_a_full_disk_does_not_hide_why_training_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("rlhf_core.supervised.trainer.save_file", full)
    ours = trainer(save_dir=tmp_path)
    ours.trained.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"loss is nan.*; the minibatch could not be kept in .*No space left"):
        ours.fit(loader(2))


def bad_batches() -> Iterator[tuple[dict[str, Any] | None, str]]:
    good = collate(EXAMPLES[:2])
    yield None, "train_dataloader holds no batch"
    yield {"input_ids": good["input_ids"]}, "lacks 'attention_mask'"
    yield {name: good[name] for name in ("input_ids", "attention_mask")}, "loss_mask or labels"
    yield good | {"loss_mask": torch.zeros_like(good["loss_mask"])}, "no tokens to learn from"
    yield good | {"input_ids": good["input_ids"] + 255}, "token id 26[0-9], but the model's vocabulary has 259"
    yield good | {"labels": good["input_ids"].roll(1, 1)}, "must be the tokens of input_ids themselves"
    packed = {"input_ids": good["input_ids"], "attention_mask": torch.ones(2, 1, 6, 6), "loss_mask": good["loss_mask"]}
    yield packed, "needs position_ids"


@pytest.mark.parametrize(("batch", "message"), list(bad_batches()))
def test_a_batch_that_cannot_be_learnt_is_named(batch: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        trainer(max_epochs=1).fit([] if batch is None else [batch])


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="accumulation_steps of at least 1"):
        trainer(accumulation_steps=0)
    with pytest.raises(ConfigError, match="no save_dir"):
        trainer(save_interval=5)
