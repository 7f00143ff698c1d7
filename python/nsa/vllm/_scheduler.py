"""vLLM's schedulers without prefix hits on pages that the same step writes, and with selected blocks in the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from . import records_selections


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


class _Recording(_LaterHits):
    """Each output also has the selected blocks of the tokens that have become known to the engine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._memory: Any = None
        self._sent: dict[str, int] = {}
        self._found: dict[str, Any] = {}

    def _update_request_with_output(self, request: Any, *arguments: Any, **options: Any) -> Any:
        result = super()._update_request_with_output(request, *arguments, **options)
        name, size = request.request_id, self.vllm_config.cache_config.block_size
        begin, end = self._sent.get(name, 0), request.num_tokens - 1  # the last one is not fed back yet
        pages = self.kv_cache_manager.get_block_ids(name)[0][begin // size : -(-end // size)]
        slots = (np.array(pages)[:, None] * size + np.arange(size)).ravel()[begin % size :][: end - begin]
        self._found[name], self._sent[name] = self._selections()[slots], end
        return result

    def _selections(self) -> Any:
        """The workers' memory, which has no name from the first output on: all of them have mapped it."""
        if self._memory is None:
            from ._attention import map_selections, selections_file

            self._memory = map_selections(self.vllm_config, self.kv_cache_config.num_blocks).numpy()
            selections_file(self.vllm_config).unlink()
        return self._memory

    def update_from_output(self, *arguments: Any, **options: Any) -> Any:
        """Outputs of a step."""
        result = super().update_from_output(*arguments, **options)
        for one in result.values():
            for output in one.outputs:
                output.routed_experts = self._found.pop(output.request_id, None)
        return result

    def _free_request(self, request: Any, *arguments: Any, **options: Any) -> Any:
        self._sent.pop(request.request_id, None)
        return super()._free_request(request, *arguments, **options)

    def shutdown(self) -> None:
        """Removes the memory's name if no output has."""
        from ._attention import selections_file

        selections_file(self.vllm_config).unlink(missing_ok=True)
        super().shutdown()


class _Synchronous(_LaterHits):
    pass


class _Asynchronous(_LaterHits, AsyncScheduler):
    pass


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """The scheduler that the engine's configuration asks for."""
    kind: type[Scheduler] = _Asynchronous if vllm_config.scheduler_config.async_scheduling else _Synchronous
    if records_selections(vllm_config):  # without asynchronous steps, see check_supported
        kind = _Recording
    return kind(vllm_config=vllm_config, **options)
