"""`rlhf deploy` says in one sentence why it cannot register deployments on a work pool."""

from __future__ import annotations

from typing import Any

import pytest

from infra.errors import ServiceError
from infra.services import deploy_elsewhere, prefect_api
from infra.settings import Settings

URL = "http://prefect.test:4200/api"
DOCKER = {"type": "docker", "base_job_template": {"variables": {"properties": {"image": {"type": "string"}}}}}
PROCESS = {"type": "process", "base_job_template": {}}  # as long as no worker has been there
POOLS = {"containers": DOCKER, "rlhf": PROCESS}


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(_url: str, method: str, path: str, *_body: Any) -> Any:
        assert method == "GET", "nothing may be changed"
        return POOLS.get(path.removeprefix("/work_pools/"))

    monkeypatch.setattr(prefect_api, "call", call)


@pytest.mark.parametrize(
    ("url", "pool", "image", "sentence"),
    [
        (None, "rlhf", None, "no Prefect server is known here; set PREFECT_API_URL"),
        (URL, "night", None, "has no work pool 'night'; make it with `prefect work-pool create`"),
        (URL, "containers", None, "containers is of type docker, whose runs are in containers; name the image"),
        (URL, "rlhf", "r/f:1", "rlhf is of type process, whose runs are in no container; leave out --image"),
    ],
)
def test_what_is_wrong_with_server_pool_or_image_is_one_sentence(
    url: str | None, pool: str, image: str | None, sentence: str
) -> None:
    known = Settings().model_copy(update={"prefect_api_url": url})
    with pytest.raises(ServiceError, match=sentence):
        deploy_elsewhere.deploy_elsewhere(known, pool, image, pytest.fail)
