"""Where the stub's deployments begin: Prefect runs this file anew for each run."""

from tests.night.stages import stand_in

__all__ = ["pipeline"]

pipeline = stand_in()
