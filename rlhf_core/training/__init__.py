"""What all trainers need: optimizer steps, boosted models, loaders, checkpoints, tracking."""
