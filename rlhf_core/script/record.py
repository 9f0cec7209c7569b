"""What a run was started with, kept beside its checkpoints: going on with something else is said."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.trainer.callbacks import Callback

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from rlhf_core.script.data import Loaders
    from rlhf_core.strategy.ranks import Ranks

FILE = "train_ppo.json"
_PLACES = {"save_path", "save_interval", "log_dir", "use_wandb", "checkpoint_path", "critic_checkpoint_path"}
_BY_CONTENT = {"prompt_dataset", "ptx_dataset", "conversation_template_config", "lora_config"}
"""Paths may differ: what they hold is compared."""


def record_of(args: Namespace, loaders: Loaders) -> dict[str, Any]:
    """Return every flag that has a part in the numbers, and a digest of each file's content."""
    flags = {name: value for name, value in vars(args).items() if name not in _PLACES | _BY_CONTENT}
    demonstrations = loaders.demonstrations
    content = {
        "prompt_dataset": loaders.prompts.dataset.digest(),  # type: ignore[attr-defined]  # a PromptDataset
        "ptx_dataset": None if demonstrations is None else demonstrations.dataset.digest(),  # type: ignore[attr-defined]
        "conversation_template_config": _digest(args.conversation_template_config),
        "lora_config": None if args.lora_config is None else _digest(args.lora_config),
    }
    return {**flags, **content}


def tell_differences(record: dict[str, Any], run: Path, tell: Callable[[str], None]) -> None:
    """Tell in a line what differs from what the run in a directory was started with.

    Args:
        record: of this command line.
        run: directory of the run that is gone on with.
        tell: takes the line.
    """
    try:
        earlier = json.loads((run / FILE).read_text(encoding="utf-8"))
        differing = [name for name in record if record[name] != earlier.get(name)]
    except (OSError, ValueError, AttributeError):
        tell(f"{run} has no {FILE} that says what it was started with; flags and data are taken as they are")
        return
    if differing:
        said = [
            f"--{name} (another content)" if name in _BY_CONTENT else f"--{name} {record[name]} ({earlier.get(name)})"
            for name in differing
        ]
        tell(f"going on with other settings than the run was started with, which are in brackets: {', '.join(said)}")


class RecordWriter(Callback):
    """Writes what a run was started with once its fit begins: until then, the directory may be another run's.

    Args:
        record: of this command line.
        run: directory of the run.
        ranks: who trains together; the first one writes.
    """

    def __init__(self, record: dict[str, Any], run: Path, ranks: Ranks) -> None:
        self._record = record
        self._run = run
        self._ranks = ranks

    def on_fit_start(self) -> None:
        """Write the file."""
        if self._ranks.is_first:
            text = json.dumps(self._record, indent=2, sort_keys=True) + "\n"
            (self._run / FILE).write_text(text, encoding="utf-8")


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
