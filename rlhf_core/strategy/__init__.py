"""How models are trained on one device or several: ranks, boosters, and coati's `Strategy`."""
