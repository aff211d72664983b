# SPDX-License-Identifier: Apache-2.0
"""Decides pods on a recorded snapshot, as the scheduler that wrote it would have (design D15).

    python -m hami_scheduler.tools.replay --snapshot FILE PODS.json … [--node NAME] [--bind]

A snapshot is what ``GET /v1/snapshot`` of a scheduler answers. Pods are JSON documents, one object
or a List per file. One JSON line per pod: every node's verdict, score or reason, and the devices
that the best node (or ``--node``) would give. With ``--bind`` each pod is placed before the next
one is asked about. Quotas and queues of the snapshot take part. The same input gives the same
bytes. Memory in MiB, compute in percent of one device.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hami_common.errors import HamiError, RequestInvalid, WireInvalid
from hami_common.events import codec
from hami_common.model.placement import ContainerShares
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import account_of
from hami_core.ledger.stimuli import Accepted, Append
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeExplanation, NodeRefusal, explain
from hami_core.placement.verdicts import Filtered, Verdicts
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.resourcequota import Asker, count_resources
from hami_core.quota.verdicts import Allowed, QuotaVerdicts
from hami_core.replay.snapshot import Snapshot, load, load_quotas

EXIT_BAD_INPUT = 2


class NodeVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node's answer."""

    node: str
    score: float | None = None
    """0..100; only where the pod fits."""
    refusal: str = ""


class PodVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What would be decided about one pod."""

    namespace: str
    pod: str
    snapshot_id: str
    problem: str = ""
    """Why the request cannot be honoured as written."""
    nodes: tuple[NodeVerdict, ...] = ()
    """Best first, then the refused ones, both by name among equals."""
    node: str = ""
    """Where the devices below are: the best node, or the one asked for."""
    containers: tuple[ContainerShares, ...] = ()
    explanation: NodeExplanation | None = None
    """How each device of the node that was asked for answers."""


def decide(
    ledger: Ledger,
    pods: Sequence[PodView],
    snapshot: Snapshot,
    *,
    node: str = "",
    bind: bool = False,
) -> Iterator[PodVerdict]:
    """A verdict for each pod, in order."""
    catalog = Catalog.from_settings()
    names = count_resources(catalog)
    verdicts = Verdicts(ledger.table)
    quota = load_quotas(snapshot)
    quotas = QuotaVerdicts(ledger.table, quota)
    for number, pod in enumerate(pods):
        known = PodVerdict(
            namespace=pod.metadata.namespace or "default",
            pod=pod.metadata.name,
            snapshot_id=snapshot.snapshot_id,
        )
        try:
            request = catalog.parse_pod(pod, defaults=snapshot.policy)
        except RequestInvalid as error:
            yield msgspec.structs.replace(known, problem=str(error))
            continue
        if request is None:
            yield msgspec.structs.replace(known, problem="asks for no device")
            continue
        asker = Asker(account=account_of(pod, names), wish=pod.labels().get(keys.QUEUE_LABEL, ""))
        filtered = quotas.allowed(
            request,
            verdicts.filter(request, ledger.table.nodes()),
            asker,
            waiting=tuple(quota.claims()),
        )
        answers = _answers(verdicts, request, filtered)
        chosen = node or next((a.node for a in answers if a.score is not None), "")
        placed = pick(ledger.table, request, chosen) if chosen else None
        verdict = msgspec.structs.replace(
            known,
            nodes=answers,
            node=chosen,
            containers=()
            if placed is None or isinstance(placed, NodeRefusal)
            else placed.containers,
            explanation=explain(ledger.table, request, node) if node else None,
        )
        if bind and verdict.containers:
            _place(ledger, quota, request, chosen, asker, number=number, now_s=snapshot.time_s)
        yield verdict


def _answers(
    verdicts: Verdicts, request: PodRequest, filtered: Filtered | Allowed
) -> tuple[NodeVerdict, ...]:
    scored = verdicts.prioritize(request, filtered.left)
    best = scored.best(len(filtered.left))
    return (
        *(NodeVerdict(node=name, score=round(score, 3)) for name, score in best),
        *(
            NodeVerdict(node=name, refusal=text)
            for name, text in sorted(
                (name, refusal.text)
                for refusal, places in filtered.groups()
                for name in filtered.nodes.several(places)
            )
        ),
    )


def _place(
    ledger: Ledger,
    quota: QuotaLedger,
    request: PodRequest,
    node: str,
    asker: Asker,
    *,
    number: int,
    now_s: float,
) -> None:
    """Book what was decided, as if the bus had accepted it."""
    plan = ledger.plan_bind(request, node, allocation_id=f"replay-{number}", now_s=now_s)
    if isinstance(plan, Append):
        plan = plan.under(asker.account)
        quota.fold(quota.seq + 1, plan.record)
        seq = ledger.fence(node) + 1
        ledger.handle(Accepted(append=plan, seq=seq, now_s=now_s))


class _Document(Struct, frozen=True):
    kind: str = ""
    items: list[PodView] | None = None


def read_pods(path: Path) -> list[PodView]:
    """Pods of a JSON file: one object, or a List."""
    data = path.read_bytes()
    document = codec.decode(data, _Document, what=str(path))
    if document.items is not None:
        return document.items
    return [codec.decode(data, PodView, what=str(path))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; exit code 0, or 2 when a file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m hami_scheduler.tools.replay")
    parser.add_argument("--snapshot", type=Path, required=True, help="answer of GET /v1/snapshot")
    parser.add_argument("--node", default="", help="explain this node, device by device")
    parser.add_argument("--bind", action="store_true", help="place each pod before the next")
    parser.add_argument("pods", type=Path, nargs="+", help="pod manifests as JSON")
    flags = parser.parse_args(argv)
    try:
        snapshot = codec.decode(flags.snapshot.read_bytes(), Snapshot, what=str(flags.snapshot))
        pods = [pod for path in flags.pods for pod in read_pods(path)]
        ledger = load(snapshot)
        for verdict in decide(ledger, pods, snapshot, node=flags.node, bind=flags.bind):
            sys.stdout.write(codec.encode(verdict).decode() + "\n")
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}\n")
        return EXIT_BAD_INPUT
    except (WireInvalid, HamiError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
