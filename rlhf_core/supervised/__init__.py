"""Supervised fine-tuning and reward models: one step, two trainers."""
