# SPDX-License-Identifier: Apache-2.0
"""Simulated kubelets: real sockets for plugins and PodResources, real container processes.

In one process::

    async with run_kubelet("node-a", tmp, Access(url=..., token=...)) as kubelet:
        kubelet.plugin_directory          # kubelet.sock, and where plugins put theirs
        kubelet.plugins_registry          # where plugins of DRA drivers put theirs
        kubelet.pod_resources_socket
        kubelet.logs("web-0", "main")     # what a container printed
        await kubelet.restart()           # containers go on; plugins must register again
        kubelet.faults.hold_admissions()  # … release_, shuffle_admissions, refuse,
        admission_delay_s

As a process: ``python -m hami_sim.kubelet --kubeconfig FILE --node a,b --root DIR``.
"""

from hami_sim.kubelet.admission import Refusal
from hami_sim.kubelet.devices import DeviceError, DeviceManager
from hami_sim.kubelet.faults import Faults
from hami_sim.kubelet.kubelet import SimKubelet, clean_up, run_kubelet
from hami_sim.kubelet.runtime import Container
from hami_sim.kubelet.settings import KubeletSettings

__all__ = [
    "Container",
    "DeviceError",
    "DeviceManager",
    "Faults",
    "KubeletSettings",
    "Refusal",
    "SimKubelet",
    "clean_up",
    "run_kubelet",
]
