"""What a flow of the night imports; its server has the settings of the worker."""

# ruff: noqa: F401 - imported for those that are forked

import prefect.deployments.steps
import prefect.engine
import prefect.flow_engine

import infra.artifacts.s3
import tasks.ppo_keeper
import tests.night.stages
from tasks.source import source_digest

source_digest()  # what it finds of the core is remembered
