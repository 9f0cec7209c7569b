"""PPO: the public trainer, the learner inside it, and what both are made of."""
