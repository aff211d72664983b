# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes control plane of processes on this machine: etcd, kube-apiserver and the rest.

``programs`` finds the programs, ``pki`` makes certificates and kubeconfigs, ``configuration`` the
files the programs read, ``controlplane`` runs them. Rules: Kubernetes 1.34.
"""

from hami_sim.kubernetes.controlplane import ControlPlane, run_control_plane
from hami_sim.kubernetes.programs import Programs, ProgramsMissing

__all__ = ["ControlPlane", "Programs", "ProgramsMissing", "run_control_plane"]
