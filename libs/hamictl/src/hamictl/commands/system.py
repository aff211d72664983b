# SPDX-License-Identifier: Apache-2.0
"""``hamictl get system``: whether the services keep up, as the registry observes it.

The Structs declare the fields that are printed, see ``SystemView`` in docs/openapi/registry.json.
Times in Unix seconds.
"""

import click
import msgspec

from hami_common.runtime.clock import SystemClock
from hamictl import client, options, output

_CLOCK = SystemClock()


class Concern(msgspec.Struct, frozen=True, kw_only=True):
    """Something an operator should look at."""

    code: str
    name: str = ""
    count: int = 0


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a service."""

    service: str
    replica: str
    last_s: float
    last: str


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A Lease by which replicas elect the one that does a background task."""

    name: str
    holder: str
    since_s: float | None
    renewed_s: float | None
    lease_s: float
    transitions: int
    is_expired: bool


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Response of ``/v1/system``."""

    concerns: tuple[Concern, ...]
    replicas: tuple[Replica, ...]
    leases: tuple[Lease, ...] = ()
    leases_problem: str = ""


@click.command()
@options.registry_option
@options.format_option
def system(registry: str, format_: str) -> None:
    """Show concerns, replicas of the services, and Leases."""
    answer = client.read(System, registry, "/v1/system")
    if output.structured(answer, format_):
        return
    now_s = _CLOCK.now_s()
    concerns = [[one.code, one.name or "-", one.count or "-"] for one in answer.concerns]
    output.table(["CONCERN", "NAME", "COUNT"], concerns, empty="Nothing observable is behind.")
    click.echo()
    replicas = [
        [one.service, one.replica, one.last, output.age(now_s - one.last_s)]
        for one in answer.replicas
    ]
    output.table(["SERVICE", "REPLICA", "LAST", "AGE"], replicas, empty="No replica wrote lately.")
    click.echo()
    if answer.leases_problem:
        click.echo(f"The Leases cannot be listed: {answer.leases_problem}", err=True)
    leases = [
        [
            one.name,
            one.holder or "-",
            "Expired" if one.is_expired else "Held",
            _age(one.since_s, now_s),
            _age(one.renewed_s, now_s),
            one.transitions,
        ]
        for one in answer.leases
    ]
    headings = ["LEASE", "HOLDER", "STATE", "HELD FOR", "RENEWED", "TRANSITIONS"]
    output.table(headings, leases, empty="No Lease is known.")


def _age(time_s: float | None, now_s: float) -> str:
    return "-" if time_s is None else output.age(now_s - time_s)
