# SPDX-License-Identifier: Apache-2.0
"""``hamictl events``: prints or follows the integration stream."""

import json
from contextlib import suppress
from pathlib import Path

import anyio
import click
import msgspec

from hami_common.bounds import INT64_MAX
from hami_common.units import whole
from hamictl import eventstream, options, output
from hamictl.errors import InputRefused


@click.command()
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(eventstream.KINDS),
    help="Only show this kind; may be repeated.",
)
@options.only_node_option
@click.option("--pod", default="", help="Only show this pod: NAME, or NAMESPACE/NAME.")
@options.only_namespace_option
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Wait for new events until interrupted; starts at the end of the stream by default.",
)
@click.option(
    "--from", "start", default=0, type=click.IntRange(0), help="Start at this sequence number."
)
@click.option(
    "--position",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that stores the next sequence number; the next call resumes there.",
)
@options.bus_options
@options.format_option
def events(  # noqa: PLR0917 - click passes them by name
    kinds: tuple[str, ...],
    node: str,
    pod: str,
    namespace: str,
    follow: bool,  # noqa: FBT001 - click passes flags so
    start: int,
    position: Path | None,
    format_: str,
    **login: str,
) -> None:
    """Print events of the integration stream in order."""
    if "/" in pod:
        namespace, _, pod = pod.partition("/")
    wanted = eventstream.Filter(
        kinds=frozenset(kinds or eventstream.KINDS), node=node, namespace=namespace, pod=pod
    )
    start = start or _position(position)

    async def run() -> None:
        async with eventstream.open_bus(**login) as bus:
            async for event in eventstream.read_events(bus, wanted, start=start, follow=follow):
                _show(event, format_)
                if position is not None:
                    await anyio.Path(position).write_text(f"{event.sequence + 1}\n")

    with suppress(KeyboardInterrupt):
        eventstream.run(run)


def _position(file: Path | None) -> int:
    if file is None or not file.exists():
        return 0
    text = file.read_text(encoding="utf-8").strip()
    position = whole(text, most=INT64_MAX)
    if position is None:
        message = f"{file}: {text[:40]!r} is not a sequence number; remove the file to start over"
        raise InputRefused(message)
    return position


def _show(event: eventstream.Event, format_: str) -> None:
    if format_ == "json":
        click.echo(json.dumps(msgspec.to_builtins(event)))
        return
    if format_ == "yaml":
        click.echo("---")
        output.structured(event, format_)
        return
    pod = f"{event.namespace}/{event.pod}" if event.pod else "-"
    text = f"{output.clock_time(event.time_s)}  {event.kind:<10}  {pod}  {event.node or '-'}"
    text += f"  {eventstream.summary(event)}"
    click.echo(f"{event.sequence:>8}  {text}" if format_ == "wide" else text)
