"""Models and their heads."""
