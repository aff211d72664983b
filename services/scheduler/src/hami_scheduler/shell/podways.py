# SPDX-License-Identifier: Apache-2.0
"""Answers why a pod waits now, and which ways there are to start it.

Computed as ``hamictl explain`` computes it: on a snapshot, in a thread, one question at a time;
others wait for their turn. The pod's constraints on nodes, and the pods that could be moved, are
read from the API server. A caller who may not read all devices and allocations gets ways that move
or wait for pods of other namespaces without their names. Seconds throughout.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import NotFound, TooManyRequests, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.model.request import PodRequest
from hami_common.ports import KubeApi
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.openapi import Operation, Parameter
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodFacts
from hami_core.planning.eligible import Document
from hami_core.planning.ways import Standing, Surroundings, Way, standing
from hami_core.planning.whatif import Governed
from hami_core.replay.snapshot import Snapshot, load, load_quotas
from hami_core.replay.tenants import surroundings
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.podapi import LIST_TIMEOUTS, MANAGED, PODS
from hami_scheduler.shell.state import State
from hami_scheduler.shell.whatif import NODES

PATH = "/v1/whatif/pods/{namespace}/{pod}"


class PodStanding(Struct, frozen=True, kw_only=True):
    """Verdict that a waiting pod would get now."""

    snapshot_id: str
    """State of the ledger that the answer is computed from."""
    namespace: str
    pod: str
    now: Standing
    """Names of other namespaces are empty for callers who may not read them."""


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path=PATH,
        name="pod",
        text="Why a pod waits now, and ways to start it, the cheapest first: request less, wait "
        "for pods, move pods, add a node. Each was tried on a copy of the present state.",
        answer=PodStanding,
        parameters=(
            Parameter(name="namespace", place="path", text="Namespace of the pod."),
            Parameter(name="pod", place="path", text="Name of the pod."),
        ),
        errors={
            404: "No such pod waits for devices.",
            429: "The replica computes other answers.",
        },
    ),
)


class PodWays:
    """Handler of the operation."""

    def __init__(
        self,
        *,
        state: State,
        kube: KubeApi,
        take: Callable[[], Awaitable[Snapshot]],
        settings: Settings,
    ) -> None:
        """``take`` returns the present snapshot."""
        self._state = state
        self._kube = kube
        self._take = take
        self._settings = settings
        self._turn = anyio.Lock()

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handler by method and path."""
        return {("GET", PATH): self.pod}

    async def pod(self, request: Request) -> Response:
        """See ``OPERATIONS``."""
        namespace, name = request.params["namespace"], request.params["pod"]
        sees_everything = await request.sees_everything()
        with anyio.move_on_after(self._settings.whatif_s) as scope:
            async with self._turn:
                scope.deadline = float("inf")
                found = await self._standing(namespace, name)
            return json_response(found if sees_everything else _for_namespace(found))
        raise TooManyRequests(
            problem="this replica computes other answers", fix="try again in a moment"
        )

    async def _standing(self, namespace: str, name: str) -> PodStanding:
        taken = await self._take()
        waiting = {(one.namespace, one.name): one for one in taken.waiting}
        request = waiting.get((namespace, name))
        known = self._state.pods.get(request.uid) if request is not None else None
        if request is None or known is None:
            raise NotFound(what=f"waiting pod {namespace}/{name}")
        around = await read_around(self._kube, known, self._settings)
        compute = partial(_computed, taken, request, around)
        return PodStanding(
            snapshot_id=taken.snapshot_id,
            namespace=namespace,
            pod=name,
            now=await anyio.to_thread.run_sync(compute),
        )


class Around(Struct, frozen=True, kw_only=True):
    """Answers of the API server about a waiting pod and what is around it."""

    pod: bytes
    nodes: Sequence[bytes]
    managed: Sequence[bytes]
    """All pods with devices."""
    vendors: VendorSettings

    def surroundings(self, taken: Snapshot, ledger: Ledger) -> Surroundings:
        """Decode the answers. ``WireInvalid``: one is not of its kind."""
        try:
            return surroundings(
                taken,
                ledger,
                msgspec.json.decode(self.pod, type=Document),
                _items(self.nodes),
                list(_items(self.managed)),
                catalog=Catalog.from_settings(self.vendors),
            )
        except UNDECODABLE as error:
            raise WireInvalid(what="object of the API server", problem=str(error)) from error


async def read_around(kube: KubeApi, pod: PodFacts, settings: Settings) -> Around:
    """Read the pod, all nodes and all pods with devices."""
    size = settings.list_page_size
    with answer_within(LIST_TIMEOUTS * settings.api_timeout_s, peer="API server"):
        return Around(
            pod=await kube.get(pod.path()),
            nodes=await kube.list_pages(NODES, page_size=size),
            managed=await kube.list_pages(PODS, label_selector=MANAGED, page_size=size),
            vendors=settings.vendors,
        )


def _computed(taken: Snapshot, request: PodRequest, around: Around) -> Standing:
    """Compute the verdict; runs in a thread and reads nothing of the live state."""
    ledger = load(taken)
    governed = Governed(load_quotas(taken), taken.quotas.askers)
    return standing(ledger, request, around.surroundings(taken, ledger), governed=governed)


def _items(pages: Sequence[bytes]) -> Iterator[Document]:
    for page in pages:
        yield from msgspec.json.decode(page).get("items") or []


def _for_namespace(found: PodStanding) -> PodStanding:
    """Leave out names of pods in other namespaces."""
    ways = tuple(_way_for_namespace(way, found.namespace) for way in found.now.closest)
    return replace(found, now=replace(found.now, closest=ways))


def _way_for_namespace(way: Way, namespace: str) -> Way:
    return replace(
        way,
        moves=tuple(
            one
            if one.namespace == namespace
            else replace(one, namespace="", pod="", uid="", gives=(), takes=())
            for one in way.moves
        ),
        ends=tuple(
            one if one.namespace == namespace else replace(one, kind="", namespace="", name="")
            for one in way.ends
        ),
    )
