"""Pictures of a run, as PNG bytes. The functions import matplotlib, which is slow: import them inside a task's body.

`panels` says what is drawn and knows no matplotlib; `style` says how; the other modules make one figure each.
"""
