# SPDX-License-Identifier: Apache-2.0
"""ProvisioningRequests: reads them and the pods that they announce, and decides their conditions.

Outside documents: cluster-autoscaler's API ``autoscaling.x-k8s.io`` v1 and v1beta1, which have the
same fields, and the rules of its class ``check-capacity.autoscaling.x-k8s.io`` (1.36): a request
without capacity stays pending unless its parameter ``noRetry`` is ``true``, fails some days after
its creation, and books capacity for a time once it has some. Unix seconds throughout.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import OBJECT_LIST_MOST, Count, MapKey, Name, Word
from hami_common.errors import RequestInvalid
from hami_common.pods.podview import MetadataView
from hami_core.planning.conditions import Condition, kube_time, unix_s
from hami_core.planning.demands import PodSet, Verdict

CHECK_CAPACITY: Final = "check-capacity.autoscaling.x-k8s.io"
"""Class of cluster-autoscaler, whose requests other processors answer by ``INSTANCE``."""
INSTANCE: Final = "processorInstance"
"""Parameter that names the processor of a request of that class."""
NO_RETRY: Final = "noRetry"
"""Parameter, ``true``: a request without capacity fails at once."""
Outcome = Literal["provisioned", "waiting", "undecided", "failed", "expired"]
_OURS: Final = ("Accepted", "Provisioned", "Failed", "BookingExpired")
_ACCEPTED: Final = Condition(
    type="Accepted",
    status="True",
    reason="Accepted",
    message="HAMi's scheduler answers the request",
)
_MESSAGE_MOST: Final = 32_000
Document = dict[str, Any]


class Reference(Struct, frozen=True, kw_only=True):
    """Name of an object in the namespace of the request."""

    name: Name = ""


class PodSetRef(Struct, frozen=True, kw_only=True, rename="camel"):
    """Equal pods of a PodTemplate."""

    pod_template_ref: Reference = Reference()
    count: Count = 1


class Spec(Struct, frozen=True, kw_only=True, rename="camel"):
    """``spec``."""

    provisioning_class_name: Name = ""
    pod_sets: list[PodSetRef] = []
    parameters: Annotated[dict[MapKey, Word], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class Status(Struct, frozen=True, kw_only=True):
    """``status``."""

    conditions: list[Condition] = []


class ProvisioningRequest(Struct, frozen=True, kw_only=True):
    """The fields of a ProvisioningRequest that we read."""

    metadata: MetadataView = MetadataView()
    spec: Spec = Spec()
    status: Status = Status()

    def condition(self, name: str) -> Condition:
        """Return the condition, without a status if the request has none."""
        found = (one for one in self.status.conditions if one.type == name)
        return next(found, Condition(type=name))

    def has(self, name: str) -> bool:
        """Return whether the condition is True."""
        return self.condition(name).status == "True"

    def is_over(self) -> bool:
        """Return whether the request has failed, its booking has ended, or it is being deleted."""
        return (
            self.has("Failed")
            or self.has("BookingExpired")
            or self.metadata.deletion_timestamp is not None
        )

    def parameter(self, name: str) -> str:
        """Return the parameter; empty when it is missing."""
        return (self.spec.parameters or {}).get(name, "")

    def is_for(self, class_name: str, instance: str) -> bool:
        """Return whether the processor of ``class_name`` answers the request.

        ``instance``: its name for requests of cluster-autoscaler's class; empty: it answers none.
        """
        wanted = self.spec.provisioning_class_name
        if wanted == CHECK_CAPACITY and class_name != CHECK_CAPACITY:
            return bool(instance) and self.parameter(INSTANCE) == instance
        return wanted == class_name

    def is_retried(self) -> bool:
        """Return whether the request stays pending without capacity.

        ``RequestInvalid``: the parameter is neither true nor false.
        """
        value = self.parameter(NO_RETRY)
        if value not in ("", "true", "false"):
            raise RequestInvalid(
                field=f"spec.parameters.{NO_RETRY}",
                problem=f"{value!r} is neither true nor false",
                fix="write a new request with true, false, or without the parameter",
            )
        return value != "true"

    def booked_until_s(self, booking_s: float) -> float:
        """Return the end of the booking, which lasts ``booking_s``; only of a provisioned one."""
        return unix_s(self.condition("Provisioned").last_transition_time) + booking_s

    def expires_s(self, expire_s: float) -> float:
        """Return the time at which the request fails if it has no capacity by then."""
        return unix_s(self.metadata.creation_timestamp) + expire_s


def missing_templates(request: ProvisioningRequest, templates: Mapping[str, Document]) -> list[str]:
    """Return the names of PodTemplates that do not exist; ``templates``: pods by name."""
    names = (one.pod_template_ref.name for one in request.spec.pod_sets)
    return sorted({name for name in names if name not in templates})


def pod_sets_of(request: ProvisioningRequest, templates: Mapping[str, Document]) -> list[PodSet]:
    """Return the pods that the request announces; all its ``templates`` exist.

    A pod set has the name of its template, and its position where several share one.
    """
    names = [one.pod_template_ref.name for one in request.spec.pod_sets]
    uses = Counter(names)
    return [
        PodSet(
            name=name if uses[name] == 1 else f"{name} ({index})",
            count=one.count,
            pod=templates[name],
        )
        for index, (name, one) in enumerate(zip(names, request.spec.pod_sets, strict=True))
    ]


class Answer(Struct, frozen=True, kw_only=True):
    """Conditions of a request, and what they come to."""

    outcome: Outcome
    conditions: tuple[Condition, ...]


def judged(request: ProvisioningRequest, verdict: Verdict) -> Answer:
    """Return the answer to a request about whose pods ``verdict`` was given."""
    if verdict.state == "Ready":
        found = _true("Provisioned", "CapacityIsFound", verdict.message)
        return Answer(outcome="provisioned", conditions=(_ACCEPTED, found))
    if verdict.state == "Rejected":
        return failed("RequestInvalid", verdict.message)
    if verdict.state == "Retry" and not request.is_retried():
        refused = _true("Failed", "CapacityIsNotFound", verdict.message)
        return Answer(outcome="failed", conditions=(_ACCEPTED, refused))
    if verdict.state == "Retry":
        return waiting("CapacityIsNotFound", verdict.message)
    return replace(waiting("NotDecided", verdict.message), outcome="undecided")


def waiting(reason: str, message: str) -> Answer:
    """Return the answer to a request that is tried again."""
    found = Condition(type="Provisioned", status="False", reason=reason, message=message)
    return Answer(outcome="waiting", conditions=(_ACCEPTED, found))


def failed(reason: str, message: str) -> Answer:
    """Return the answer to a request that is not tried again."""
    return Answer(outcome="failed", conditions=(_true("Failed", reason, message),))


def expired(reason: str, message: str) -> Answer:
    """Return the answer to a request whose booking has ended."""
    return Answer(outcome="expired", conditions=(_true("BookingExpired", reason, message),))


def _true(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True", reason=reason, message=message)


def merged(
    request: ProvisioningRequest, answer: Answer, *, now_s: float
) -> Sequence[Condition] | None:
    """Return all conditions of ours with those of ``answer``; ``None`` if that changes nothing.

    The time of a condition is that of its last change of status, as Kubernetes asks for.
    """
    before = {one.type: one for one in request.status.conditions if one.type in _OURS}
    found = dict(before)
    for new in answer.conditions:
        old = before.get(new.type, Condition(type=new.type))
        is_same = old.status == new.status
        found[new.type] = replace(
            new,
            message=new.message[:_MESSAGE_MOST],
            last_transition_time=old.last_transition_time if is_same else kube_time(now_s),
        )
    return None if found == before else list(found.values())
