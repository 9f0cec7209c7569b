"""The run's report: stored as an artifact, shown on the run's page and in the terminal.

`facts` gathers what is told, `samples` chooses answers to show, `tables` holds the tables, `page` puts it on
a run's page in Prefect, `write` holds the tasks. `rlhf_core/escaping.py` makes harmless what others wrote.
"""
