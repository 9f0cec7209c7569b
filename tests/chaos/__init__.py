"""Real processes of PPO runs killed at seeded moments, and the runs held to the bits of undisturbed ones."""
