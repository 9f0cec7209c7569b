"""Four models on four groups of Ray actors: the third topology, behind `train_prompts_on_ray`."""
