# SPDX-License-Identifier: Apache-2.0
"""A simulated Kubernetes API server: the REST and watch protocol of 1.34 that this system uses.

In one process::

    async with ApiServer(Settings()) as server:
        server.url, server.token          # base URL, admin bearer token
        server.kubeconfig(path)           # writes a kubeconfig (optionally for another token)
        server.store                      # objects in memory; `store.forget_history()` forces 410
        server.audit                      # AuditEntry per finished request, newest last
        server.requests(Match(verb="create", resource="pods"))
        server.faults.add(Fault(match=Match(resource="pods", subresource="binding"),
                                action="lose-response"))   # delay | deny | cut | lose-response
        server.drop_watches(Match(resource="pods"), cut=True)

As a process of its own: ``python -m hami_sim.apiserver --port 0 --kubeconfig PATH [--data FILE]``;
it prints one JSON line ``{"url": ..., "pid": ...}`` when it listens. With the admin token the same
faults can be set over HTTP: POST or DELETE /hami-sim/faults, POST /hami-sim/drop-watches,
POST /hami-sim/forget-history, GET /hami-sim/audit.

:class:`hami_sim.kube.Objects` is the client of the simulated components.
:mod:`hami_sim.certs` makes throw-away authorities and certificates (webhooks in tests).

A resource type is one row in :mod:`hami_sim.apiserver.resources`. The suite
``tests/contract/kubeapi`` defines which behavior is faithful; it also runs against a real
kube-apiserver.
"""

from hami_sim.apiserver.auth import AuditEntry, RequestInfo, User
from hami_sim.apiserver.errors import ApiError
from hami_sim.apiserver.faults import Fault, Match
from hami_sim.apiserver.server import ApiServer
from hami_sim.apiserver.settings import Settings

__all__ = [
    "ApiError",
    "ApiServer",
    "AuditEntry",
    "Fault",
    "Match",
    "RequestInfo",
    "Settings",
    "User",
]
