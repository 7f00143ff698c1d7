"""vLLM's schedulers without prefix hits on pages that the same step writes."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class _LaterHits(Scheduler):
    """Full pages become available to other requests in the step after the one that writes them.

    vLLM announces them when it schedules the step. Full attention writes all keys before it reads any. A block that is
    compressed here may begin in a page that another request of the step has yet to write.
    """

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Schedules a step."""
        coordinator = self.kv_cache_manager.coordinator
        announce, announced = coordinator.cache_blocks, []
        coordinator.cache_blocks = lambda *given: announced.append(given)
        try:
            return super().schedule(*arguments, **options)
        finally:
            coordinator.cache_blocks = announce
            for request, *rest in announced:
                if request.status != RequestStatus.PREEMPTED:  # in this very step: its pages are gone
                    announce(request, *rest)


class _Synchronous(_LaterHits):
    pass


class _Asynchronous(_LaterHits, AsyncScheduler):
    pass


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """The scheduler that the engine's configuration asks for."""
    kind = _Asynchronous if vllm_config.scheduler_config.async_scheduling else _Synchronous
    return kind(vllm_config=vllm_config, **options)
