"""Supervised fine-tuning and reward models: one step, one stage, two trainers."""
