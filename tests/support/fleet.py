# SPDX-License-Identifier: Apache-2.0
"""A client of the registry's fleet: keeps nodes, and replaces those that an event contains."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import aiohttp

Document = dict[str, Any]
WORDS = {
    "devices": ("vendor", "model", "mode", "reason", "partitions", "stranded_by"),
    "allocations": ("namespace", "state", "queue", "priority_class", "held_for", "origin"),
    "shares": (),
}


class FleetClient:
    """Nodes as a browser would show them, built from documents alone."""

    def __init__(self, snapshot: Document) -> None:
        self.nodes: dict[str, Document] = {}
        self.silent: list[str] = []
        self.id = ""
        self.apply(snapshot)

    def apply(self, document: Document) -> None:
        """Replace the nodes of the document by its content."""
        devices, allocations, shares = (_rows(document, part) for part in WORDS)
        nodes = document["nodes"]
        for number, name in enumerate(nodes["name"]):
            listed = list(islice(allocations, nodes["allocations"][number]))
            # The devices come first: their order in the node numbers the shares.
            self.nodes[name] = {
                "problem": document["words"][nodes["problem"][number]],
                "devices": list(islice(devices, nodes["devices"][number])),
                "allocations": [
                    {**one, "shares": list(islice(shares, one["shares"]))} for one in listed
                ],
            }
        assert not any(list(rest) for rest in (devices, allocations, shares))
        if document["silent"] is not None:
            self.silent = document["silent"]
        self.id = document["id"]

    def shown(self) -> Document:
        """Everything but the position."""
        return {"nodes": self.nodes, "silent": self.silent}


def _rows(document: Document, part: str) -> Iterator[Document]:
    columns = document[part]
    words = document["words"]
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        for name in WORDS[part]:
            row[name] = words[row[name]]
        yield row


class Event(NamedTuple):
    """One server-sent event."""

    name: str
    id: str | None
    data: Document


async def next_event(content: aiohttp.StreamReader) -> Event:
    """Read up to the next event; comments are skipped."""
    while True:
        fields: dict[str, str] = {}
        while line := (await content.readline()).decode().rstrip("\n"):
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        if "event" in fields:
            return Event(fields["event"], fields.get("id"), json.loads(fields["data"]))
