"""The run's report: stored as an artifact, shown on the run's page and in the terminal.

`facts` gathers what is told, `samples` chooses answers to show, `tables` and `text` write it down, `markdown` escapes
it, `page` puts it on a run's page in Prefect, `write` holds the tasks.
"""

from tasks.report.write import show_episodes, show_evaluations, show_training, write_report

__all__ = ["show_episodes", "show_evaluations", "show_training", "write_report"]
