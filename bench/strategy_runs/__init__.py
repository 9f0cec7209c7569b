"""What `bench/strategies.py` has each rank do."""
