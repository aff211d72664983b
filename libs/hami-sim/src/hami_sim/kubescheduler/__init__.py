# SPDX-License-Identifier: Apache-2.0
"""A simulated kube-scheduler that speaks the extender protocol.

In one process::

    settings = SchedulerSettings.for_extender("http://127.0.0.1:9398")
    async with SimScheduler(Access.from_kubeconfig(path), settings) as scheduler:
        scheduler.attempts        # what was tried, in order
        scheduler.queue.counts()  # active, backoff, unschedulable, in flight

As a process: ``python -m hami_sim.kubescheduler --kubeconfig PATH --extender-url URL``, or with
``--config FILE``, a KubeSchedulerConfiguration as production uses it. That process also runs a
second scheduler, which serves ``default-scheduler`` and calls no extender, as a cluster's own does.
Within one scheduler, pods are served by profile name (`hami-scheduler` and `default-scheduler`
unless configured); which pods reach the extender follows from its managedResources, as in the real
one.
"""

from hami_sim.kubescheduler.loop import Attempt, SimScheduler
from hami_sim.kubescheduler.settings import (
    ExtenderSettings,
    ManagedResource,
    SchedulerSettings,
    load,
)

__all__ = [
    "Attempt",
    "ExtenderSettings",
    "ManagedResource",
    "SchedulerSettings",
    "SimScheduler",
    "load",
]
