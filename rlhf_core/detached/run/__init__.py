"""The trainer of a run of the flow: its episodes, their chunks, and what is kept of them."""
