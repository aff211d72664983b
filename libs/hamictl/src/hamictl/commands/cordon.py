# SPDX-License-Identifier: Apache-2.0
"""``hamictl cordon`` and ``uncordon``: mark a device unschedulable for new pods, or undo it."""

import click

from hami_common.runtime.clock import SystemClock
from hami_common.runtime.devicecordon import REASON_LENGTH_MOST, CordonChange, change_cordon
from hamictl import client, kube, options, output
from hamictl.errors import Absent, InputRefused

_CLOCK = SystemClock()

_device_node_option = click.option(
    "--node", default="", help="Node of the device; read from the registry by default."
)


@click.group()
def cordon() -> None:
    """Mark a device unschedulable for new pods."""


@click.group()
def uncordon() -> None:
    """Mark a device schedulable again."""


@cordon.command(name="device")
@click.argument("uuid")
@click.option("--reason", default="", help="Reason to record for other operators.")
@_device_node_option
@options.registry_option
@options.kubeconfig_option
@options.format_option
def cordon_device(  # noqa: PLR0917 - click passes them by name
    uuid: str, reason: str, node: str, registry: str, kubeconfig: str, format_: str
) -> None:
    """Mark a device unschedulable for new pods; running pods stay."""
    if len(reason) > REASON_LENGTH_MOST:
        message = f"--reason has {len(reason)} characters, give at most {REASON_LENGTH_MOST}"
        raise InputRefused(message)
    change = CordonChange(uuids=(uuid,), cordoned=True, reason=reason.strip(), now_s=_CLOCK.now_s())
    _apply(change, node=node, registry=registry, kubeconfig=kubeconfig, format_=format_)


@uncordon.command(name="device")
@click.argument("uuid")
@_device_node_option
@options.registry_option
@options.kubeconfig_option
@options.format_option
def uncordon_device(uuid: str, node: str, registry: str, kubeconfig: str, format_: str) -> None:
    """Mark a device schedulable for new pods again."""
    change = CordonChange(uuids=(uuid,), cordoned=False, now_s=_CLOCK.now_s())
    _apply(change, node=node, registry=registry, kubeconfig=kubeconfig, format_=format_)


def _apply(
    change: CordonChange, *, node: str, registry: str, kubeconfig: str, format_: str
) -> None:
    (uuid,) = change.uuids
    node = node or _node_of(uuid, registry)
    (done,) = kube.with_kube(kubeconfig, lambda api: change_cordon(api, node, change))
    if output.structured(done, format_):
        return
    word = "cordoned" if done.cordoned else "uncordoned"
    already = "" if done.changed else " already"
    click.echo(f"{uuid} on {node} is{already} {word}" + (f": {done.reason}" if done.reason else ""))


def _node_of(uuid: str, registry: str) -> str:
    answer = client.read(client.Devices, registry, "/v1/devices")
    found = sorted({device.node for device in answer.items if device.uuid == uuid})
    if not found:
        message = f"device {uuid} not found; see hamictl get devices -o wide, or give --node"
        raise Absent(message)
    if len(found) > 1:
        message = f"several nodes have device {uuid}: give --node with one of {', '.join(found)}"
        raise InputRefused(message)
    return found[0]
