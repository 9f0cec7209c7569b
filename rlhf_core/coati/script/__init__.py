"""What `train_ppo` does between its command line and `PPOTrainer`."""
