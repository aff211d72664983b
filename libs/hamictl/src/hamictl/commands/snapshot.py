# SPDX-License-Identifier: Apache-2.0
"""``hamictl snapshot``: saves a scheduler's state to a file."""

from pathlib import Path

import click

from hamictl import client, options


@click.command()
@options.scheduler_option
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def snapshot(scheduler: str, file: Path) -> None:
    """Save a scheduler's state, for simulate and defrag."""
    body = client.fetch(scheduler, "/v1/snapshot")
    file.write_bytes(body)
    click.echo(f"{file}: {len(body)} bytes")
