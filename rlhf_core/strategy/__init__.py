"""How models are trained on one device or several: ranks, the booster protocol, and a plain booster."""
