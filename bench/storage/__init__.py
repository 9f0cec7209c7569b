"""What bench/store.py and bench/sharing.py measure the artifact store with."""
