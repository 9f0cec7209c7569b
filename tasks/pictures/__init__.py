"""Pictures of a run, as PNG bytes. The functions import matplotlib, which is slow: import them inside a task's body.

`panels` says what the curves of PPO show and knows no matplotlib; `style` says how a figure looks; `figures` draws.
"""
