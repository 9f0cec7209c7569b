"""Several processes as one trainer: how they come together, and how the first calls the others."""
