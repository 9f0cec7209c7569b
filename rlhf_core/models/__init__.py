"""Models: on disk, their heads, their adapters, and what is asked of any of them."""
