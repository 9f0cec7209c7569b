"""What PPO is compared with: runs read back from the store, more supervised learning, and tables."""
