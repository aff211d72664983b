# SPDX-License-Identifier: Apache-2.0
"""The commands that prepare an installation; they speak to the Kubernetes API alone."""

from datetime import UTC, datetime, timedelta

import anyio
import click

from hami_common import namespaces
from hami_common.errors import HamiError, NotFound, Unavailable
from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hamictl.bootstrap import Plan, bootstrap
from hamictl.errors import Absent, InputRefused, Unreachable

START_S = 60.0


@click.command(name="bootstrap")
@click.option("-n", "--namespace", default=namespaces.SYSTEM, show_default=True)
@click.option(
    "--agents-namespace",
    default=namespaces.AGENTS,
    show_default=True,
    help="Namespace of the agents, which gets copies of the public ConfigMaps; empty: no copies.",
)
@click.option("--service", default="hami-webhook", show_default=True, help="Webhook's Service.")
@click.option(
    "--webhook",
    default="hami-webhook",
    show_default=True,
    help="MutatingWebhookConfiguration to keep up to date; empty: keys only, no certificates.",
)
@click.option(
    "--bus",
    default="nats",
    show_default=True,
    help="Service of the bus, for its keys and certificate; empty: the bus is not ours.",
)
@click.option("--valid-days", default=90, show_default=True, help="Life of the certificate.")
@click.option("--renew-days", default=30, show_default=True, help="Renew when so little is left.")
@click.option("--kubeconfig", envvar="KUBECONFIG", default="", help="Empty: the pod's account.")
def bootstrap_command(
    *,
    namespace: str,
    agents_namespace: str,
    service: str,
    webhook: str,
    bus: str,
    valid_days: int,
    renew_days: int,
    kubeconfig: str,
) -> None:
    """Make the keys and certificates that an installation needs; keep those that are there."""
    if not 0 < renew_days < valid_days:
        text = f"--renew-days {renew_days} is not between 0 and --valid-days {valid_days}"
        raise InputRefused(text)
    plan = Plan(
        namespace=namespace,
        agents_namespace=agents_namespace,
        service=service,
        webhook=webhook,
        bus=bus,
        serving_valid=timedelta(days=valid_days),
        renew_before=timedelta(days=renew_days),
    )
    try:
        done = anyio.run(_bootstrap, plan, kubeconfig)
    except NotFound as error:
        raise Absent(f"{error}; apply deploy/kustomize first") from error
    except Unavailable as error:
        raise Unreachable(str(error)) from error
    except HamiError as error:
        raise InputRefused(str(error)) from error
    for line in done or ["nothing was to be done"]:
        click.echo(line)


async def _bootstrap(plan: Plan, kubeconfig: str) -> list[str]:
    now = datetime.fromtimestamp(SystemClock().now_s(), tz=UTC)
    async with kubeio.connect(kubeconfig, user_agent="hamictl", start_timeout_s=START_S) as kube:
        return await bootstrap(kube, plan, now=now)
