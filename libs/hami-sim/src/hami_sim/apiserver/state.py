# SPDX-License-Identifier: Apache-2.0
"""The parts of one server that its HTTP handlers share."""

from __future__ import annotations

from collections import deque

import msgspec

from hami_sim.apiserver.auth import AuditEntry
from hami_sim.apiserver.faults import Faults
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.resources import ResourceTable
from hami_sim.apiserver.settings import Settings
from hami_sim.apiserver.store import Store
from hami_sim.apiserver.subresources import Tokens


class State(msgspec.Struct, frozen=True, kw_only=True):
    """One server's store, operations, logins, injected faults and audit log."""

    settings: Settings
    table: ResourceTable
    store: Store
    operations: Operations
    tokens: Tokens
    faults: Faults
    audit: deque[AuditEntry]
