"""The two usage examples of the original script, as its document prints them, and what may be changed in them."""

from __future__ import annotations

import shlex
import sys

NEURAL = r"""
torchrun --nproc_per_node=4 train_ppo.py \
    --pretrain meta-llama/Llama-2-7b \
    --rm_pretrain meta-llama/Llama-2-7b \
    --prompt_dataset ./prompts \
    --conversation_template_config ./template.json \
    --plugin zero2 \
    --rm_checkpoint_path ./rm_checkpoint \
    --num_episodes 10 \
    --save_path ./ppo_checkpoint
"""
RULES = r"""
torchrun --nproc_per_node=4 train_ppo.py \
    --pretrain meta-llama/Llama-2-7b \
    --rm_pretrain meta-llama/Llama-2-7b \
    --prompt_dataset ./math_prompts \
    --conversation_template_config ./template.json \
    --no_neural_reward_model \
    --reward_functions gsm8k_reward_fn \
    --plugin zero2
"""
_CHANGES = {
    "torchrun": f"{sys.executable} -m torch.distributed.run --standalone",
    "--nproc_per_node=4": "--nproc_per_node=2",
    "train_ppo.py": "-m rlhf_core.train_ppo",
    "meta-llama/Llama-2-7b": "./model",
}


def as_command(example: str) -> list[str]:
    """Return the words of an example with the script's name, the model's path and the number of ranks changed."""
    words = shlex.split(example)
    return [part for word in words for part in shlex.split(_CHANGES.get(word, word))]
