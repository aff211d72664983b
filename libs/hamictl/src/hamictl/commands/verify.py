# SPDX-License-Identifier: Apache-2.0
"""``hamictl verify``: allocates a small share and checks each step of its way."""

import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import click
import msgspec
from msgspec import Struct

from hami_common import namespaces
from hami_common.pods.signing import Verifier
from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hami_common.vendors.catalog import Catalog
from hamictl import installation, options, output
from hamictl.errors import EXIT_NO, Absent, InputRefused, Refused
from hamictl.installation import Agent, Document
from hamictl.kube import with_kube
from hamictl.verification import (
    Request,
    Step,
    Verdict,
    Verdicts,
    Verification,
    default_resources,
    expected,
    remove_old,
)

T = TypeVar("T")
PARALLEL = 8
"""Pods at a time with ``--all-nodes``."""


class Chosen(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the command."""

    namespace: str
    node: str
    all_nodes: bool
    vendor: str
    memory_mib: int
    core_pct: int
    resources: tuple[str, ...]
    image: str
    limit_s: float
    system_namespace: str
    agents_namespace: str
    kubeconfig: str
    format_: str


class _Site(Struct, frozen=True, kw_only=True):
    """The installation as it is."""

    catalog: Catalog
    webhook: installation.WebhookSettings
    nodes: list[Document]
    agents: list[Agent]
    agent_settings: Mapping[str, Any]
    verifier: Verifier | None


@click.command()
@click.option(
    "-n", "--namespace", default="default", show_default=True, help="Namespace of the pod."
)
@click.option("--node", default="", help="Allocate on this node; empty: the scheduler chooses.")
@click.option("--all-nodes", is_flag=True, help="Allocate on each node that has an agent.")
@click.option("--vendor", default="", help="Vendor of the device; empty: each that has an agent.")
@click.option(
    "--memory",
    "memory_mib",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Memory of the share in MiB.",
)
@click.option(
    "--cores",
    "core_pct",
    type=click.IntRange(min=1, max=100),
    default=10,
    show_default=True,
    help="Compute of the share in percent of one device.",
)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    metavar="NAME=VALUE",
    help="Resource limit of the container, in place of --memory and --cores; may be repeated.",
)
@click.option(
    "--image",
    default="",
    help="Image with /bin/sh; empty: the agent's image, which its node has.",
)
@click.option(
    "--timeout",
    "limit_s",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Timeout of scheduling, and of the container's run, in seconds.",
)
@click.option(
    "--system-namespace",
    default=namespaces.SYSTEM,
    show_default=True,
    help="Namespace of the services.",
)
@options.agents_namespace_option
@options.kubeconfig_option
@options.format_option
def verify(**given: object) -> None:
    """Allocate a small share to a pod and check each step.

    The pod is deleted in every case. Exits with 1 if a step failed.
    """
    chosen = msgspec.convert(given, Chosen)
    if chosen.node and chosen.all_nodes:
        raise InputRefused("give --node or --all-nodes, not both")
    wanted = _parsed(chosen.resources)

    async def work(kube: KubeApi) -> Verdicts:
        site = await _survey(kube, chosen)
        requests = _requests(site, chosen, wanted)
        await remove_old(kube, chosen.namespace)
        return await _verify(kube, site, requests, is_quiet=chosen.format_ in ("json", "yaml"))

    verdicts = with_kube(chosen.kubeconfig, lambda kube: _until_signal(lambda: work(kube)))
    if verdicts is None:
        raise Refused("interrupted; the pods are deleted")
    if not output.structured(verdicts, chosen.format_):
        click.echo(f"{verdicts.passed} passed, {verdicts.failed} failed")
    if verdicts.failed:
        raise SystemExit(EXIT_NO)


def _parsed(resources: Sequence[str]) -> dict[str, str]:
    wanted = {}
    for text in resources:
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise InputRefused(f"--resource {text}: write NAME=VALUE")
        wanted[name] = value
    return wanted


async def _survey(kube: KubeApi, chosen: Chosen) -> _Site:
    webhook = await installation.webhook_settings(kube, chosen.system_namespace)
    return _Site(
        catalog=Catalog.from_settings(webhook.vendors),
        webhook=webhook,
        nodes=await installation.items(kube, "/api/v1/nodes"),
        agents=await installation.agents(kube, chosen.agents_namespace),
        agent_settings=await installation.settings(
            kube, chosen.agents_namespace, installation.AGENT_FILE
        ),
        verifier=await installation.verifier(kube, chosen.system_namespace),
    )


def _requests(site: _Site, chosen: Chosen, wanted: Mapping[str, str]) -> list[Request]:
    """Return the pods to create; ``Absent`` if no agent fits the options."""
    known = [vendor.name for vendor in site.catalog.vendors]
    if chosen.vendor and chosen.vendor not in known:
        raise InputRefused(f"--vendor {chosen.vendor}: give one of {', '.join(known)}")
    found = [
        Request(
            vendor=agent.vendor,
            resources=dict(wanted)
            or default_resources(
                site.catalog.vendor(agent.vendor),
                memory_mib=chosen.memory_mib,
                core_pct=chosen.core_pct,
            ),
            image=chosen.image or str(agent.container.get("image", "")),
            is_python=not chosen.image,
            pull_policy="" if chosen.image else agent.container.get("imagePullPolicy", ""),
            namespace=chosen.namespace,
            node=place,
            limit_s=chosen.limit_s,
        )
        for agent in site.agents
        if agent.vendor in known and chosen.vendor in ("", agent.vendor)
        for place in _places(agent, site.nodes, chosen)
    ]
    if not found:
        who = f" of {chosen.vendor}" if chosen.vendor else ""
        where = f" on node {chosen.node}" if chosen.node else ""
        raise Absent(
            f"no agent{who} runs{where}: label the nodes (docs/install.md), and run hamictl doctor"
        )
    return found


def _places(agent: Agent, nodes: Sequence[Document], chosen: Chosen) -> list[str]:
    """Return the nodes to allocate on; an empty name leaves the choice to the scheduler."""
    served = sorted(one["metadata"]["name"] for one in nodes if agent.selects(one))
    if chosen.node:
        return [chosen.node] if chosen.node in served else []
    if chosen.all_nodes:
        return served
    return [""] if served else []


async def _verify(
    kube: KubeApi, site: _Site, requests: Sequence[Request], *, is_quiet: bool
) -> Verdicts:
    verdicts: dict[int, Verdict] = {}
    limiter = anyio.CapacityLimiter(PARALLEL)

    async def one(number: int, request: Request) -> None:
        title = f"{request.vendor}{f' on {request.node}' if request.node else ''}"

        def report(step: Step) -> None:
            if is_quiet:
                return
            word = "ok" if step.passed else "FAIL"
            click.echo(f"{title}: {step.name} {step.duration_s:.2f} s {word}: {step.text}")
            if step.fix:
                click.echo(f"  fix: {step.fix}")

        async with limiter:
            verdicts[number] = await Verification(
                kube,
                request,
                expected(
                    site.catalog,
                    request.vendor,
                    webhook=site.webhook,
                    agent=site.agent_settings,
                    verifier=site.verifier,
                ),
                name=f"hami-verify-{secrets.token_hex(4)}",
                clock=SystemClock(),
                report=report,
            ).run()

    async with anyio.create_task_group() as group:
        for number, request in enumerate(requests):
            group.start_soon(one, number, request)
    found = tuple(verdicts[number] for number in sorted(verdicts))
    passed = sum(verdict.passed for verdict in found)
    return Verdicts(passed=passed, failed=len(found) - passed, items=found)


async def _until_signal(work: Callable[[], Awaitable[T]]) -> T | None:
    """Run ``work``; cancel it and return ``None`` at SIGINT or SIGTERM, after its clean-up."""
    found: list[T] = []

    async def run() -> None:
        found.append(await work())
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            group.start_soon(run)
            async for _ in received:
                group.cancel_scope.cancel()
    return found[0] if found else None
