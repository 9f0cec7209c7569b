"""Public names of the core: they exist, they load lazily, and their parameters stay."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import rlhf_core


def test_importing_the_package_and_its_configuration_imports_no_torch() -> None:
    code = (
        "import sys, rlhf_core, rlhf_core.config, rlhf_core.errors; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray', 'prefect')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("name", rlhf_core.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(rlhf_core, name).__name__ == name
    assert name in dir(rlhf_core)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PPOLerner'"):
        _ = rlhf_core.PPOLerner


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("NaiveExperienceMaker", ["actor", "critic", "reward_model", "initial_model", "config", "template", "seed"]),
        ("NaiveExperienceBuffer", ["sample_batch_size", "limit", "cpu_offload", "seed"]),
        ("PPOLearner", ["actor", "critic", "config", "device"]),
    ],
)
def test_inherited_classes_keep_their_parameters(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(rlhf_core, name)).parameters) == parameters
