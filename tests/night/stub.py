"""Where the stub's deployments begin: Prefect runs this file anew for each run, and the stages are replaced once."""

from tests.night.stages import pipeline

__all__ = ["pipeline"]
