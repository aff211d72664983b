# SPDX-License-Identifier: Apache-2.0
"""The contract of a vendor's pure half, over every vendor of the catalog."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jsonpatch
import msgspec
import pytest
from msgspec.structs import fields

from hami_common.errors import RequestInvalid
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods.podview import ContainerView, PodView
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.protocol import InjectionMode, RenderContext, Vendor
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, mutate
from tests.contract.vendors.cases import CASES
from tests.contract.vendors.shape import Case
from tests.support import builders

CATALOG = Catalog.from_settings()
NAMES = tuple(vendor.name for vendor in CATALOG.vendors)
MODES: tuple[InjectionMode, ...] = ("cdi", "devices", "env")
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


def for_each_vendor(test: Callable[[str], None]) -> Callable[[], None]:
    """Run the test once per vendor; a failure names the vendor."""

    def each() -> None:
        for name in NAMES:
            try:
                test(name)
            except BaseException as error:
                error.add_note(f"vendor {name}")
                raise

    each.__name__, each.__doc__ = test.__name__, test.__doc__
    return each


def case(name: str) -> Case:
    return CASES[name]


def vendor(name: str) -> Vendor:
    return CATALOG.vendor(name)


def container(limits: dict[str, str], **more: Any) -> ContainerView:
    document = {"name": "main", "resources": {"limits": limits}, **more}
    return msgspec.convert(document, ContainerView)


def pod(
    limits: dict[str, str], annotations: dict[str, str] | None = None, uid: str = "u"
) -> dict[str, Any]:
    return {
        "metadata": {"name": uid, "namespace": "ns", "uid": uid, "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }


def asks(name: str) -> list[dict[str, str]]:
    """The manifests of the vendor."""
    return [limits for limits in (case(name).whole, case(name).part) if limits]


def table_with(name: str, count: int = 2) -> DeviceTable:
    """A node with some devices of the vendor."""
    one = case(name).device
    table = DeviceTable()
    devices = [
        msgspec.structs.replace(one, uuid=f"{name}-{i}", index=i, minor=i) for i in range(count)
    ]
    table.upsert_node(builders.node_devices("node", devices, vendor=name))
    return table


def placed(table: DeviceTable, name: str, limits: dict[str, str], uid: str = "u") -> Any:
    """Book the share that a pod with these limits gets; returns it."""
    view = msgspec.convert(pod(limits, dict(case(name).annotations), uid), PodView)
    request = CATALOG.parse_pod(view)
    assert request is not None
    found = pick(table, request, "node")
    if isinstance(found, Placement):
        assert table.book("node", found.containers) == ()
    return found


def settings_names(name: str) -> Iterator[tuple[str, str]]:
    """(field, value) of the vendor's settings that are resource names."""
    section = getattr(VendorSettings(), name)
    for info in fields(section):
        value = getattr(section, info.name)
        if info.name.endswith("_name") and isinstance(value, str):
            yield info.name, value


@for_each_vendor
def test_every_vendor_has_a_case(name: str) -> None:
    assert case(name).make().name == name


@for_each_vendor
def test_names_are_of_one_vendor_only(name: str) -> None:
    for other in CATALOG.vendors:
        if other.name != name:
            assert not vendor(name).resources.all() & other.resources.all()


@for_each_vendor
def test_every_name_is_a_qualified_one(name: str) -> None:
    names = vendor(name).resources.all()
    assert names
    assert all("/" in one and len(one.split("/")[1]) <= 63 for one in names)


@for_each_vendor
def test_families_are_all_in_the_names(name: str) -> None:
    one = vendor(name)
    assert {f.count for f in one.families} <= one.resources.all()
    assert one.resources.count == one.families[0].count


@for_each_vendor
def test_a_device_is_advertised_under_a_name_that_serves_it(name: str) -> None:
    counts = vendor(name).advertised(case(name).device)
    assert counts
    assert set(counts) <= {family.count for family in vendor(name).families}


@for_each_vendor
def test_a_container_without_known_resources_requests_nothing(name: str) -> None:
    for limits in ({}, {"cpu": "1", "example.com/gpu": "1"}):
        assert vendor(name).parse_request(container(limits)) is None
        assert vendor(name).admit(container(limits)) is None


@for_each_vendor
def test_zero_devices_are_no_request_or_refused(name: str) -> None:
    for limits in asks(name):
        counts = {f.count for f in vendor(name).families} & limits.keys()
        zero = {**limits, **dict.fromkeys(counts, "0")}
        if counts and case(name).refuses_zero:
            with pytest.raises(RequestInvalid, match="0 is no request"):
                vendor(name).parse_request(container(zero), case(name).annotations)
        elif counts:
            assert vendor(name).parse_request(container(zero), case(name).annotations) is None


@for_each_vendor
def test_amounts_without_a_count_get_one_or_are_refused(name: str) -> None:
    for family in vendor(name).families:
        for amount in filter(None, (family.memory, family.memory_percentage, family.cores)):
            if name == "ascend" and amount == family.cores:
                continue
            if name in ("nvidia", "enflame"):
                request = vendor(name).parse_request(container({amount: "16"}))
                assert request is not None
                assert request.count == 1
                continue
            with pytest.raises(RequestInvalid) as caught:
                vendor(name).parse_request(container({amount: "16"}))
            assert caught.value.fix == f"add {family.count}: 1"


@for_each_vendor
def test_compute_above_a_device_is_read_as_all_of_it_with_a_warning(name: str) -> None:
    limits = case(name).part or case(name).whole
    families = [f for f in vendor(name).families if f.cores and f.all() & limits.keys()]
    if not families or name == "ascend":
        return
    full = {**limits, families[0].cores: str(families[0].core_units)}
    more = {**limits, families[0].cores: "1000"}
    annotations = case(name).annotations
    wanted = vendor(name).parse_request(container(full), annotations)
    assert vendor(name).parse_request(container(more), annotations) == wanted
    changes = vendor(name).admit(container(more), annotations)
    assert changes is not None
    assert [text for text in changes.warnings if "more than one device has, read as" in text]


@for_each_vendor
def test_admission_is_idempotent_and_keeps_the_request(name: str) -> None:
    for limits in asks(name):
        annotations = dict(case(name).annotations)
        document = pod(limits, annotations)
        before = CATALOG.parse_pod(msgspec.convert(document, PodView))
        assert before is not None
        after = document
        last = document
        for _ in range(2):
            verdict = mutate(
                after,
                msgspec.convert(after, PodView),
                catalog=CATALOG,
                policy=AdmissionPolicy(),
                at=Circumstances(traceparent=TRACE, claim=""),
            )
            assert verdict.allowed, verdict.message
            changed = jsonpatch.apply_patch(after, list(verdict.operations))
            assert CATALOG.parse_pod(msgspec.convert(changed, PodView)) == before
            last, after = after, changed
        assert after == last
        counts = {f.count for f in vendor(name).families}
        assert counts & after["spec"]["containers"][0]["resources"]["limits"].keys()


@for_each_vendor
def test_requests_count_where_limits_are_missing(name: str) -> None:
    for limits in asks(name):
        by_requests = msgspec.convert(
            {"name": "main", "resources": {"requests": limits}}, ContainerView
        )
        annotations = case(name).annotations
        assert vendor(name).parse_request(by_requests, annotations) == vendor(name).parse_request(
            container(limits), annotations
        )


@for_each_vendor
def test_bad_quantities_are_refused_with_the_field_and_a_fix(name: str) -> None:
    assert case(name).bad
    for resource, text in case(name).bad:
        limits = {**(case(name).part or case(name).whole), resource: text}
        for act in (vendor(name).parse_request, vendor(name).admit):
            with pytest.raises(RequestInvalid) as caught:
                act(container(limits), case(name).annotations)
            assert caught.value.fix
            assert "container main" in caught.value.field
            assert any(one in caught.value.field for one in vendor(name).resources.all())


@for_each_vendor
def test_every_name_can_be_another(name: str) -> None:
    section = getattr(VendorSettings(), name)
    names = dict(settings_names(name))
    assert names or hasattr(section, "chips")
    made = case(name).make(
        case(name).settings(**{key: f"example.com/{key.replace('_', '-')}" for key in names})
    )
    for key, value in names.items():
        assert f"example.com/{key.replace('_', '-')}" in made.resources.all()
        assert value not in made.resources.all() or value in made.resources.aliases


@for_each_vendor
def test_unknown_settings_are_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="resource_cuont"):
        msgspec.convert({name: {"resource_cuont": "x"}}, VendorSettings)


@for_each_vendor
def test_aliases_equal_the_canonical_name(name: str) -> None:
    one = vendor(name)
    for alias, target in one.resources.aliases.items():
        assert target in one.resources.all()
        family = next(f for f in one.families if target in f.all())
        amount = "0" if target == family.cores else "1"
        limits = {alias: "1"} if target == family.count else {family.count: "1", alias: amount}
        changes = one.admit(container(limits), case(name).annotations)
        assert changes is not None
        assert alias in changes.remove_resources
        assert any(alias in warning for warning in changes.warnings)


@for_each_vendor
def test_devices_are_selected_by_exact_uuid(name: str) -> None:
    selector = vendor(name).parse_selector({case(name).selector_uuid: " a , b"})
    assert selector.allow_uuids == ("a", "b")
    assert not selector.accepts_uuid("ab")
    assert selector.accepts_uuid("b")


@for_each_vendor
def test_no_annotation_is_no_constraint(name: str) -> None:
    selector = vendor(name).parse_selector({})
    assert selector.accepts_uuid("any")
    assert selector.accepts_type("Any 1")


@for_each_vendor
def test_a_whole_device_is_exclusive_and_takes_all_of_it(name: str) -> None:
    table = table_with(name, 4)
    found = placed(table, name, case(name).whole)
    assert isinstance(found, Placement), found
    for share in found.containers[0].shares:
        assert share.exclusive
        assert share.memory_mib == case(name).device.capacity_mib


@for_each_vendor
def test_a_partition_takes_what_the_device_grants_and_leaves_capacity_for_another(
    name: str,
) -> None:
    if not case(name).part:
        assert case(name).device.mode == "whole"
        return
    table = table_with(name, 1)
    first = placed(table, name, case(name).part, "a")
    second = placed(table, name, case(name).part, "b")
    for found in (first, second):
        if not isinstance(found, Placement):
            assert case(name).device.slots < 2 or "Core" in found.code, found
            continue
        (share,) = found.containers[0].shares
        assert share.memory_mib == case(name).part_mib
        assert not share.exclusive
    assert isinstance(first, Placement), first
    usage = table.usage("node", f"{name}-0")
    assert usage is not None
    assert usage.memory_mib == case(name).part_mib * (1 + isinstance(second, Placement))


@for_each_vendor
def test_oversized_request_is_refused_with_a_reason(name: str) -> None:
    table = table_with(name, 1)
    limits = {**case(name).whole, vendor(name).families[0].count: "1"}
    if name in ("ascend", "iluvatar"):
        limits = dict.fromkeys(case(name).whole, "1")
    first = placed(table, name, limits, "a")
    assert isinstance(first, Placement), first
    second = placed(table, name, limits, "b")
    assert isinstance(second, NodeRefusal)
    assert second.text.startswith(f"{second.code}: ")


@for_each_vendor
def test_devices_of_other_vendors_never_serve(name: str) -> None:
    table = table_with(name)
    for other in NAMES:
        if other != name:
            view = msgspec.convert(pod(case(other).whole, dict(case(other).annotations)), PodView)
            request = CATALOG.parse_pod(view)
            assert request is not None
            found = pick(table, request, "node")
            assert isinstance(found, NodeRefusal)
            assert found.code == "NodeUnregistered"


@for_each_vendor
def test_rendering_is_the_same_each_time_and_names_the_device(name: str) -> None:
    for limits, mode in product(asks(name), MODES):
        found = placed(table_with(name, 4), name, limits)
        assert isinstance(found, Placement)
        shares = found.containers[0]
        one = case(name).device
        devices = [
            msgspec.structs.replace(one, uuid=s.uuid, index=i, minor=i)
            for i, s in enumerate(shares.shares)
        ]
        context = RenderContext(mode=mode)
        edits = vendor(name).render(shares, devices, context)
        assert edits == vendor(name).render(shares, devices, context)
        if mode == "env":
            assert edits.env or edits.devices
            assert not edits.cdi_devices
        else:
            assert edits.devices or edits.cdi_devices
        assert all(node.host_path.startswith("/") for node in edits.devices)
        assert all(mount.host_path.startswith("/") for mount in edits.mounts)


@for_each_vendor
def test_variables_of_the_node_are_taken_from_containers(name: str) -> None:
    found = placed(table_with(name, 4), name, case(name).part or case(name).whole)
    assert isinstance(found, Placement)
    shares = found.containers[0]
    edits = vendor(name).render(
        shares,
        [msgspec.structs.replace(case(name).device, uuid=s.uuid) for s in shares.shares],
        RenderContext(mode="env"),
    )
    for variable in edits.env:
        if variable.startswith(("CUDA_DEVICE_MEMORY", "NVIDIA_", "NPU_")) or "VISIBLE" in variable:
            changes = vendor(name).admit(
                container(
                    case(name).part or case(name).whole, env=[{"name": variable, "value": "all"}]
                ),
                case(name).annotations,
            )
            assert changes is not None
            if not variable.startswith("NPU_GLOBAL"):
                assert variable in changes.remove_env


@for_each_vendor
def test_shares_of_other_vendors_are_not_rendered(name: str) -> None:
    shares = ContainerShares(
        name="main",
        kind="app",
        shares=(Share(vendor="somebody", uuid="x", memory_mib=1),),
    )
    edits = vendor(name).render(shares, [], RenderContext(mode="devices"))
    assert "x" not in "".join(edits.env.values())


@for_each_vendor
def test_capability_includes_placement(name: str) -> None:
    assert vendor(name).capability.placed


@for_each_vendor
def test_canonical_devices_survive_the_wire(name: str) -> None:
    message = builders.node_devices("node", [case(name).device], vendor=name)
    assert msgspec.json.decode(msgspec.json.encode(message), type=NodeDevices) == message
