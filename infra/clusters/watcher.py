"""The watchdog of a run on somebody else's cluster: an actor on the head that ends what the run has there.

The run's driver may be killed or stopped, on any node, at any moment; the head is there as long as the cluster is.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

import ray

from infra.clusters.control_server import ControlServer

logger = logging.getLogger(__name__)
WATCHERS = "rlhf-watchers"
"""The namespace of all watchers; each has the name of its run, so that a cluster has one run of a name."""
HEAD = {"node:__internal_head__": 0.001}
"""Ray gives its head a resource of this name, and no other node."""
_LOOK_S = 1.0
_END_S = 30.0


class Charge(NamedTuple):
    """What is watched."""

    namespace: str
    """Of the run's actors and placement groups."""
    job: str
    """The driver's."""
    stalled_after_s: float
    """Silence after which the driver counts as stopped."""


class Watcher:
    """Ends a run's actors and placement groups, then itself, when the run's driver is gone or silent."""

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._silent_looks = 0
        # Its worker process was given the cluster's token: nothing is to be loaded.
        self._server = ControlServer(ray.get_runtime_context().gcs_address)
        self._me = bytes.fromhex(ray.get_runtime_context().get_actor_id())
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def beat(self) -> None:
        """Hear that the driver runs."""
        self._silent_looks = 0

    def _watch(self) -> None:
        reason = self._reason()
        logger.warning("ending what the run in %s left: %s", self._charge.namespace, reason)
        while True:
            try:
                self._server.end_runs(self._charge.namespace.__eq__, _END_S)
                self._server.kill(self._server.actors(lambda actor: bool(actor.actor_id == self._me)))
            except Exception as error:  # whatever it is: nobody else would end the run
                logger.error("%r; trying again", error)  # noqa: TRY400 - one sentence says it
            time.sleep(_LOOK_S)

    def _reason(self) -> str:
        """Return why the run must end, once it must."""
        while True:
            time.sleep(_LOOK_S)
            # Looks are counted, not seconds: were this process stopped, it would find words it has not read yet.
            self._silent_looks += 1
            if self._silent_looks * _LOOK_S > self._charge.stalled_after_s:
                return f"its driver has been silent for {self._charge.stalled_after_s:g} s"
            try:
                if self._server.job(self._charge.job).is_over:
                    return "its driver is gone"
            except Exception as error:  # as of a control server that is away for a while: the watch goes on
                logger.warning("%r; looking again", error)
