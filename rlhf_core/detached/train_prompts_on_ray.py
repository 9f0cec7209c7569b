"""`python -m rlhf_core.detached.train_prompts_on_ray`: the name that is documented, of the module in `coati`."""

import sys

from rlhf_core.coati import train_prompts_on_ray

if __name__ == "__main__":
    sys.exit(train_prompts_on_ray.cli())
sys.modules[__name__] = train_prompts_on_ray
