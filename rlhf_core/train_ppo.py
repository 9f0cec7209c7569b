"""`python -m rlhf_core.train_ppo`, also under torchrun: the name that is documented, of the module in `coati`."""

import sys

from rlhf_core.coati import train_ppo

if __name__ == "__main__":
    sys.exit(train_ppo.main())
sys.modules[__name__] = train_ppo
