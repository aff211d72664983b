# SPDX-License-Identifier: Apache-2.0
"""Reads what pods request from their manifests, as admission and the scheduler would."""

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.request import PlacementPolicy, PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.podfacts import account_of
from hami_core.quota.resourcequota import Asker, count_resources

_QOS_RESOURCES = ("cpu", "memory")
"""Resources that determine a pod's quality of service class."""


class Rejected(Struct, frozen=True, kw_only=True):
    """A pod that admission would deny."""

    namespace: str
    pod: str
    problem: str


class Requested(Struct, frozen=True, kw_only=True):
    """Requests of several pods."""

    requests: tuple[PodRequest, ...]
    """In the order of the pods; the uids are those of ``uid_of``."""
    askers: Mapping[str, Asker]
    """By uid."""
    rejected: tuple[Rejected, ...]
    without_devices: int
    """Pods that request no device."""


def uid_of(number: int) -> str:
    """Return the uid of the pod at this position."""
    return f"whatif-{number}"


def read(pods: Iterable[PodView], catalog: Catalog, policy: PlacementPolicy) -> Requested:
    """Read the requests; ``policy`` is that of pods that name none."""
    names = count_resources(catalog)
    askers: dict[str, Asker] = {}
    requests: list[PodRequest] = []
    rejected: list[Rejected] = []
    plain = 0
    for number, pod in enumerate(pods):
        try:
            request = catalog.parse_pod(pod, defaults=policy)
        except RequestInvalid as error:
            namespace = pod.metadata.namespace or "default"
            rejected.append(
                Rejected(namespace=namespace, pod=pod.metadata.name, problem=str(error))
            )
            continue
        if request is None:
            plain += 1
        else:
            request = replace(request, uid=uid_of(number))
            askers[request.uid] = _asker_of(pod, names)
            requests.append(request)
    return Requested(
        requests=tuple(requests),
        askers=askers,
        rejected=tuple(rejected),
        without_devices=plain,
    )


def _asker_of(pod: PodView, names: Mapping[str, tuple[str, str]]) -> Asker:
    """Return the quota account of a manifest's pod; ``names`` as of ``count_resources``."""
    if not pod.status.qos_class:
        asked = {
            name
            for _, container in pod.containers_in_order()
            for name in (*container.limits(), *container.requests())
        }
        if asked.isdisjoint(_QOS_RESOURCES):
            pod = replace(pod, status=replace(pod.status, qos_class="BestEffort"))
    return Asker(account=account_of(pod, names), wish=pod.labels().get(keys.QUEUE_LABEL, ""))
