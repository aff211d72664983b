# SPDX-License-Identifier: Apache-2.0
"""``hamictl rotate-key``: replaces the key that signs allocations, and retires the old one."""

import click

from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hamictl import options
from hamictl.errors import EXIT_NO
from hamictl.kube import with_kube
from hamictl.output import progress
from hamictl.rotation import Retired, Rotation


@click.command()
@click.option(
    "--retire", is_flag=True, help="Trust old keys no longer, if no pod is left that they signed."
)
@click.option(
    "--refresh",
    "refresh_s",
    type=click.FloatRange(min=0),
    default=150.0,
    show_default=True,
    help="Time for kubelet to refresh the agents' files before the new key signs, in seconds.",
)
@click.option(
    "--timeout",
    "rollout_s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Timeout of one restart of the scheduler, in seconds.",
)
@options.services_namespace_option
@options.agents_namespace_option
@options.kubeconfig_option
def rotate_key(  # noqa: PLR0917 - click passes them by name
    retire: bool,  # noqa: FBT001 - click passes flags so
    refresh_s: float,
    rollout_s: float,
    namespace: str,
    agents_namespace: str,
    kubeconfig: str,
) -> None:
    """Replace the key that signs allocations.

    Pods start and run meanwhile. It may be repeated after an interruption. Old keys stay trusted
    until --retire, which exits with 1 and names the pods while some need them.
    """

    async def work(kube: KubeApi) -> str | Retired:
        rotation = Rotation(
            kube,
            namespace=namespace,
            agents_namespace=agents_namespace,
            clock=SystemClock(),
            refresh_s=refresh_s,
            rollout_s=rollout_s,
            report=progress,
        )
        return await (rotation.retire() if retire else rotation.run())

    done = with_kube(kubeconfig, work)
    if isinstance(done, str):
        click.echo(f"key {done} signs allocations")
        click.echo("next: hamictl rotate-key --retire, once pods from before have ended")
        return
    for pod in done.pods:
        click.echo(f"pod {pod.namespace}/{pod.pod} needs key {pod.key}")
    if done.pods:
        raise SystemExit(EXIT_NO)
    click.echo(f"no longer trusted: {', '.join(done.removed) or 'none'}")
