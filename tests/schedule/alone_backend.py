"""The CPU backend, with a start of transfers that come alone, as the backend on a GPU has it."""

from __future__ import annotations

import numpy as np

from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.backend.work import LayerWork, TransferPlan
from paddle_kv.schedule import alone


class AloneBackend(CpuBackend):
    """Counts the transfers that were ``started_alone``."""

    started_alone = 0
    most_blocks = 1 << 20  # of one; tests of large ones make it small

    def wait_on_compute(self, stream, event, timeout_s):
        compute = self.compute_stream(stream)
        self.wait_on_stream(compute, event, timeout_s)
        return compute

    def start_alone(self, binding, transfer, group, sections):
        return group.host.call_here(lambda: self._start_alone(binding, transfer, group, sections))

    def _start_alone(self, binding, transfer, group, sections):
        scheduler, report = transfer.scheduler, transfer.reporter()
        with group.lock:
            if transfer.num_blocks > self.most_blocks:
                return False
            if group.sections != sections or group._inside is not None or group.alone is not None:
                return False
            device, host = (np.frombuffer(ids, np.int64) for ids in transfer.ids)
            layers = scheduler.device_cache.spec.num_layers
            plan = TransferPlan(transfer.direction, device, host, layers, scheduler.layers_per_event)
            events = transfer.held.events
            waits = [[events[alone.COMPUTE]], *[[]] * (plan.num_groups - 1)]
            records = events[alone.FIRST_GROUP :]
            work = LayerWork(plan, 0, plan.num_groups, waits, events[alone.START], records, number=transfer.number)
            self.record(events[alone.COMPUTE], self.compute_stream(scheduler.default_stream))
            self.copy_layers(binding, work, scheduler.resources.streams[transfer.direction])
            group.alone = transfer
            scheduler.resources.reserve.clear()
            self.started_alone += 1
        transfer.token = self.watch(events[-1:], report)
        return True
