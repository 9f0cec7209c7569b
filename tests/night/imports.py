"""What a flow of the night imports, and looks up at its start; its server has the settings of the worker."""

# ruff: noqa: F401 - imported for those that are forked

import prefect.deployments.steps
import prefect.engine
import prefect.flow_engine

import tasks.ppo
import tasks.ppo_keeper
import tests.night.stages
from infra.artifacts.credentials import S3Options
from infra.artifacts.s3 import bodies
from infra.artifacts.s3_requests import Patience
from tasks.report import write
from tasks.source import source_digest
from tests.warm import quicken

for modules in ((), ["data"], ["preferences"], ["evaluate"], tasks.ppo.MODULES, [f"report/{n}" for n in write.MODULES]):
    source_digest(*modules)  # remembered, as is what botocore reads for its first client
quicken()
bodies(S3Options("http://127.0.0.1:1", "key", "secret", region="us-east-1"), Patience())
