"""What bench/strategies.py measures strategies with."""
