"""Where rows are: directories, patterns, saved datasets, copies of hub datasets, and what is none of these."""

from __future__ import annotations

import math
import re
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhf_core.config.data import SourceConfig
from rlhf_core.data.reading.places import dataset_part, is_hub_name
from rlhf_core.errors import DataError
from tests.unit.data.reading_files import read, refusal, rows, write, written


def table(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"prompt": list(prompts)}), path)
    return path


def prompts(path: Path | str, **source: object) -> list[str]:
    return [row.prompt for row in rows(path, "prompts", **source)]


def test_a_directory_is_read_file_by_file_in_the_order_of_names_and_every_format(tmp_path: Path) -> None:
    write(tmp_path / "d" / "b.jsonl", {"prompt": "second"})
    table(tmp_path / "d" / "c.parquet", "third")
    written(tmp_path / "d", b"prompt\nfirst\n", "a.csv")
    written(tmp_path / "d", b'[{"prompt": "fourth"}]', "d.json")
    written(tmp_path / "d", b"no data", "README.md")
    found = read(tmp_path / "d", "prompts")
    assert [row.prompt for row in found.rows] == ["first", "second", "third", "fourth"]
    assert found.sources[0].form == "CSV: prompts; JSON lines: prompts; Parquet: prompts; JSON array: prompts"


def test_only_the_split_is_read_of_a_directory_whose_files_are_named_for_splits(tmp_path: Path) -> None:
    for name in ("train-00000", "train-00001", "test", "val"):
        write(tmp_path / "d" / f"{name}.jsonl", {"prompt": name})
    assert prompts(tmp_path / "d") == ["train-00000", "train-00001"]
    assert prompts(tmp_path / "d", split="validation") == ["val"]
    message = refusal(tmp_path / "d", "prompts", split="dev")
    assert "are of the splits test, train, validation, and none of 'dev'" in message


def test_a_pattern_names_files_in_order(tmp_path: Path) -> None:
    for name in ("b/x.jsonl", "a/y.jsonl", "a/z.txt"):
        write(tmp_path / name, {"prompt": name})
    assert prompts(tmp_path / "*" / "*.jsonl") == ["a/y.jsonl", "b/x.jsonl"]
    assert prompts(tmp_path / "**" / "?.jsonl") == ["a/y.jsonl", "b/x.jsonl"]
    message = refusal(tmp_path / "*.jsonl", "prompts")
    assert f"no file matches {tmp_path}/*.jsonl; {tmp_path} holds a, b" in message
    assert "names directories only" in refusal(tmp_path / "*", "prompts")


def test_a_file_whose_name_has_brackets_is_a_file(tmp_path: Path) -> None:
    assert prompts(write(tmp_path / "data[1].jsonl", {"prompt": "a"})) == ["a"]


def test_a_dataset_saved_to_disk_is_read(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "Hi"}]}])
    split.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "two")
    assert prompts(tmp_path / "one") == prompts(tmp_path / "two", split="test") == ["Hi"]
    assert "has the splits train, test" in refusal(tmp_path / "two", "prompts", split="dev")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"no arrow")
    assert "cannot be loaded" in refusal(tmp_path / "one", "prompts")


def test_the_copy_of_a_hub_dataset_is_read_by_the_real_loader(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    table(copy / "data" / "train-00000-of-00001.parquet", "a", "b")
    table(copy / "data" / "test-00000-of-00001.parquet", "c")
    assert prompts(copy) == ["a", "b"]
    assert prompts(copy, split="test") == ["c"]
    assert prompts(copy, split="train[:1]") == ["a"]
    message = refusal(copy, "prompts", split="dev")
    assert "Unknown split \"dev\". Should be one of ['train', 'test']" in message
    assert "dataset" in read(copy, "prompts").sources[0].form


def test_a_card_says_which_files_are_of_which_subset(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    table(copy / "easy.parquet", "easy")
    table(copy / "hard.parquet", "hard")
    card = "---\nconfigs:\n- config_name: easy\n  data_files: easy.parquet\n- config_name: hard\n"
    (copy / "README.md").write_text(card + "  data_files: hard.parquet\n---\n")
    assert prompts(copy, subset="hard") == ["hard"]
    assert "Available: ['easy', 'hard']" in refusal(copy, "prompts", subset="soft")
    assert "easy" in refusal(copy, "prompts")


def test_a_hub_name_is_loaded_by_the_real_loader_with_subset_split_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, loader, asked = tmp_path / "copy", datasets.load_dataset, []
    table(copy / "train.parquet", "a")
    table(copy / "test.parquet", "b", "c")
    files = "  - split: train\n    path: train.parquet\n  - split: test\n    path: test.parquet\n"
    (copy / "README.md").write_text(f"---\nconfigs:\n- config_name: hard\n  data_files:\n{files}---\n")

    def from_the_copy(path: str, *, revision: str | None, **options: object) -> object:
        asked.append((path, revision, options.pop("cache_dir"), options["name"], options["split"]))
        return loader(str(copy), cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", from_the_copy)
    source = {"subset": "hard", "split": "test", "revision": "v2"}
    assert prompts("acme/talk", **source) == ["b", "c"]
    assert asked == [("acme/talk", "v2", None, "hard", "test")]
    assert "row 1 of acme/talk (hard), split test" in refusal("acme/talk", "problems", **source)


def test_a_damaged_copy_of_a_hub_dataset_is_told_in_a_sentence(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    table(copy / "data" / "train.parquet", "a").write_bytes(b"PAR1 no more")
    assert refusal(copy, "prompts").startswith(f"dataset {copy} cannot be loaded: ")


@pytest.mark.parametrize("name", ["openai/gsm8k", "Anthropic/hh-rlhf", "a/b.c"])
def test_an_owner_and_a_name_are_a_hub_dataset(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize("name", ["gsm8k", "data/train.jsonl", "./data/x", "../x", "a/b/c", "/a", "~/x", "a/b.csv.gz"])
def test_other_paths_are_no_hub_names(name: str) -> None:
    assert not is_hub_name(name)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'acme/none' on the Hub (LocalEntryNotFoundError)"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'acme/none' doesn't exist on the Hub or cannot be accessed."),
    ],
)
def test_a_hub_name_that_cannot_be_loaded_is_told_both_ways(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError, match="'acme/none' is no file or directory here, and as a dataset of the hub it"
    ) as caught:
        list(dataset_part(SourceConfig(path="acme/none")).scan())
    assert str(error).rstrip(".") in str(caught.value)


def test_an_address_of_another_kind_is_refused() -> None:
    assert "is of a kind that is not read" in refusal("https://example.com/data.jsonl", "prompts")


@pytest.mark.parametrize("address", ["s3://", "s3://*/x.jsonl"])
def test_an_address_without_a_bucket_is_refused(address: str) -> None:
    assert "names no bucket" in refusal(address, "prompts")


def test_a_path_that_the_system_refuses_is_told_in_a_sentence() -> None:
    assert "cannot be read: File name too long" in refusal("x" * 5000 + ".jsonl", "prompts")


def test_a_link_that_leads_nowhere_is_named_and_never_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.jsonl", {"prompt": "a"})
    (tmp_path / "d" / "b.jsonl").symlink_to("gone.jsonl")
    (tmp_path / "e").symlink_to("nowhere")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / ".#a.jsonl").symlink_to("editor@machine")
    write(tmp_path / "f" / "a.jsonl", {"prompt": "a"})
    assert prompts(tmp_path / "f") == ["a"]
    sentence = f"data file {tmp_path}/d/b.jsonl is a link that leads nowhere: there is no gone.jsonl"
    for path in ("d/b.jsonl", "d", "d/*.jsonl"):
        with pytest.raises(DataError, match=re.escape(sentence)):
            read(tmp_path / path, "prompts")
    assert f"is under {tmp_path}/e, a link that leads nowhere" in refusal(tmp_path / "e" / "a.jsonl", "prompts")


def test_a_dataset_that_was_saved_as_arrays_is_read_plainly_and_with_all_columns(tmp_path: Path) -> None:
    shown = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "Hi"}], "id": 1}])
    shown.with_format("numpy").save_to_disk(tmp_path / "arrays")
    shown.with_format(columns=["id"]).save_to_disk(tmp_path / "one column")
    assert prompts(tmp_path / "arrays") == prompts(tmp_path / "one column") == ["Hi"]


def test_a_saved_dataset_with_a_damaged_text_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": ["whole text"]}).save_to_disk(tmp_path / "d")
    file = next((tmp_path / "d").glob("*.arrow"))
    file.write_bytes(file.read_bytes().replace(b"whole text", b"whole \xffext"))
    assert "cannot be read after row 0: 'utf-8' codec" in refusal(tmp_path / "d", "prompts")


def test_numbers_of_single_precision_are_read_as_they_were_written(tmp_path: Path) -> None:
    numbers = ["0.1", "16777216.0", "1e-10", "3.4028235e+38", "-2.5"]
    columns = {"question": list("abcde"), "answer": pa.array([float(each) for each in numbers], pa.float32())}
    parquet.write_table(pa.table(columns), tmp_path / "p.parquet")
    datasets.Dataset(pa.table(columns)).save_to_disk(tmp_path / "d")
    for path in (tmp_path / "p.parquet", tmp_path / "d"):
        assert [row.answer for row in rows(path)] == numbers
    halves = {"question": list("abcd"), "answer": pa.array(np.float16([0.1, 2.5, 2048, 1e-4]))}
    parquet.write_table(pa.table(halves), tmp_path / "p.parquet")
    datasets.Dataset(pa.table(halves)).save_to_disk(tmp_path / "halves")
    for path in (tmp_path / "p.parquet", tmp_path / "halves"):
        assert [row.answer for row in rows(path)] == ["0.1", "2.5", "2048.0", "0.0001"]
    none = {"question": list("ab"), "answer": ["1", "2"], "x": pa.array([None, math.nan], pa.float32())}
    parquet.write_table(pa.table(none), tmp_path / "p.parquet")
    assert [row.answer for row in rows(tmp_path / "p.parquet")] == ["1", "2"]
    square = datasets.Features({"prompt": datasets.Value("string"), "x": datasets.Array2D((1, 1), "float32")})
    datasets.Dataset.from_list([{"prompt": "a", "x": [[0.1]]}], features=square).save_to_disk(tmp_path / "square")
    assert prompts(tmp_path / "square") == ["a"]


def test_parquet_of_types_that_json_has_not_is_read_or_named(tmp_path: Path) -> None:
    def refused(**columns: pa.Array) -> str:
        parquet.write_table(pa.table(columns), tmp_path / "p.parquet")
        return refusal(tmp_path / "p.parquet")

    asked, answer = pa.array(["a"]), pa.array(["1"])
    parquet.write_table(
        pa.table({"question": asked.dictionary_encode(), "answer": pa.array([Decimal("1.50")])}), tmp_path / "p.parquet"
    )
    assert [(row.prompt, row.answer) for row in rows(tmp_path / "p.parquet")] == [("a", "1.50")]
    assert "'question' must be a string, but is bytes" in refused(question=pa.array([b"a"]), answer=answer)
    assert "must be a string, but is a time" in refused(question=asked, answer=pa.array([datetime(2020, 1, 1)]))
    beyond = pa.array([2**45], pa.timestamp("s"))
    assert "holds a value after row 0 that Python cannot hold" in refused(question=asked, answer=answer, at=beyond)
    far = pa.array([0], pa.timestamp("s", tz="Mars/Phobos"))
    assert "that Python cannot hold ('Mars/Phobos')" in refused(question=asked, answer=answer, at=far)
