# SPDX-License-Identifier: Apache-2.0
"""Devices a pod gets: constraints, order of devices, booking of containers side by side."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from hami_common.events.allocation import hold_uid, purpose_of
from hami_common.model.device import Device, Profile
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import (
    Choice,
    DevicePolicy,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
    ScoringWeights,
)
from hami_core.ledger.ledger import Hold, Ledger
from hami_core.ledger.stimuli import Accepted, Append
from hami_core.placement.fit import Plan, compile_request
from hami_core.placement.pick import pick, satisfies, with_limits
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.search import is_searchable
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support.builders import (
    ask,
    container,
    device,
    devices,
    held,
    node_devices,
    pod,
    share,
    whole,
)


def table_of(*some: Device, links: tuple[tuple[str, str, int], ...] = ()) -> DeviceTable:
    table = DeviceTable()
    table.upsert_node(node_devices("n", some, links=links))
    return table


def placed(table: DeviceTable, request: PodRequest) -> list[list[str]]:
    """UUIDs by container; empty when the pod does not fit."""
    found = pick(table, request, "n")
    if isinstance(found, NodeRefusal):
        return []
    return [[share.uuid for share in c.shares] for c in found.containers]


def code(table: DeviceTable, request: PodRequest) -> str | None:
    found = pick(table, request, "n")
    return found.code if isinstance(found, NodeRefusal) else None


# --- one device --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "request_", "want"),
    [
        (device("x"), pod(ask(mib=40_000, core=100)), None),
        (device("x"), pod(ask(mib=40_001)), "CardInsufficientMemory"),
        (device("x", capacity_mib=80_000), pod(ask(mib=80_000)), None),
        (device("x", capacity_mib=20_000), pod(ask(pct=51)), "CardInsufficientMemory"),
        (device("x", capacity_mib=20_000), pod(ask(pct=50)), None),
        (device("x"), pod(ask(core=101)), "CardInsufficientCore"),
        (device("x", core_pct=200), pod(ask(core=101)), None),
        (device("x", core_pct=0), pod(ask()), None),
        (device("x", core_pct=0), pod(ask(core=1)), "CardInsufficientCore"),
        (device("x", healthy=False), pod(ask()), "CardNotHealth"),
        (device("x", cordoned=True), pod(ask()), "CardCordoned"),
        (device("x", slots=0), pod(ask()), "CardTimeSlicingExhausted"),
        (device("x"), pod(ask(2)), "NodeInsufficientDevice"),
        (device("x"), pod(ask(vendor="ascend")), "NodeUnregistered"),
    ],
)
def test_device_is_refused_for_its_own_properties(
    here: Device, request_: PodRequest, want: str | None
) -> None:
    assert code(table_of(here), request_) == want


@pytest.mark.parametrize(
    ("selector", "want"),
    [
        (DeviceSelector(allow_types=("a100",)), None),
        (DeviceSelector(allow_types=("H100", "A100")), None),
        (DeviceSelector(allow_types=("H100",)), "CardTypeMismatch"),
        (DeviceSelector(deny_types=("a100",)), "CardTypeMismatch"),
        (DeviceSelector(allow_types=("A100",), deny_types=("NVIDIA",)), "CardTypeMismatch"),
        (DeviceSelector(modes=("soft", "mig")), None),
        (DeviceSelector(modes=("mig",)), "ModeNotFit"),
        (DeviceSelector(allow_uuids=("y", "x")), None),
        (DeviceSelector(allow_uuids=("y",)), "CardUuidMismatch"),
        (DeviceSelector(deny_uuids=("x",)), "CardUuidMismatch"),
        (DeviceSelector(allow_uuids=("x",), deny_uuids=("x",)), "CardUuidMismatch"),
    ],
)
def test_pod_chooses_devices_by_type_mode_and_name(
    selector: DeviceSelector, want: str | None
) -> None:
    assert code(table_of(device("x")), pod(ask(), selector=selector)) == want


def test_one_node_serves_shares_parts_and_whole_devices_side_by_side() -> None:
    table = table_of(
        device("m", mode="mig"), device("s", index=1), device("e", index=2), device("w", index=3)
    )
    table.book("n", [held(share("e", 40_000, 100, exclusive=True))])
    table.book("n", [held(share("s", 1_000))])
    assert placed(table, pod(ask())) == [["w"]]
    assert placed(table, pod(ask(), device=("binpack",))) == [["s"]]
    assert placed(table, pod(whole())) == [["w"]]
    assert placed(table, pod(ask(), selector=DeviceSelector(modes=("mig",)))) == [["m"]]
    assert code(table, pod(whole(2))) == "AllocatedCardsInsufficientRequest"
    assert code(table_of(device("m", mode="mig")), pod(ask())) == "ModeNotFit"


def test_share_records_the_mode_that_its_pod_named() -> None:
    table = table_of(
        device("m", mode="mps"), device("t", mode="timeslice", index=1), device("s", index=2)
    )

    def given(*modes: str) -> list[tuple[str, str]]:
        found = pick(table, pod(ask(), selector=DeviceSelector(modes=modes)), "n")
        assert isinstance(found, Placement)
        return [(one.uuid, one.mode) for one in found.containers[0].shares]

    assert given() == given("soft") == [("s", "")]
    assert given("mps") == [("m", "mps")]
    assert given("timeslice") == [("t", "timeslice")]


def test_service_of_one_device_serves_one_device_and_never_a_whole_one() -> None:
    table = table_of(device("a", mode="mps"), device("b", mode="mps", index=1))
    named = DeviceSelector(modes=("mps",))
    assert code(table, pod(ask(), selector=named)) is None
    assert code(table, pod(ask(2), selector=named)) == "ModeNotFit"
    assert code(table, pod(whole(), selector=named)) == "ModeNotFit"
    slices = table_of(device("a", mode="timeslice"), device("b", mode="timeslice", index=1))
    assert code(slices, pod(ask(2), selector=DeviceSelector(modes=("timeslice",)))) is None


@pytest.mark.parametrize(
    ("mode", "cap", "grades", "want"),
    [
        ("soft", True, (("memory", "B"),), None),
        ("soft", False, (("memory", "B"),), "ModeNotFit"),
        ("soft", True, (("compute", "B"),), "ModeNotFit"),
        ("timeslice", False, (("memory", "C"),), None),
        ("timeslice", False, (("compute", "C"),), "ModeNotFit"),
        ("mps", False, (("compute", "C"),), None),
        ("mps", False, (("fault", "B"),), "ModeNotFit"),
    ],
)
def test_demand_of_isolation_is_judged_by_the_devices_class(
    mode: str, grades: tuple[tuple[str, str], ...], want: str | None, *, cap: bool
) -> None:
    table = table_of(device("x", mode=mode, memory_cap=cap))
    selector = DeviceSelector(modes=(mode,), min_isolation=grades)
    assert code(table, pod(ask(), selector=selector)) == want


def test_pod_that_names_a_partition_is_refused_where_no_device_has_any() -> None:
    table, named = table_of(device("x")), replace(ask(), profile="1g")
    assert code(table, pod(ask())) is None
    assert code(table, pod(named)) == "CardPartitionMismatch"
    assert code(table, pod(replace(ask(), exact=(("core", 2),)))) == "CardPartitionMismatch"
    assert code(table, pod(ask())) is None


@pytest.mark.parametrize(
    ("other", "want"),
    [
        (replace(ask(), types=("T4",)), "CardTypeMismatch"),
        (replace(ask(), modes=("mig",)), "ModeNotFit"),
        (replace(ask(), profile="1g"), "CardPartitionMismatch"),
    ],
)
def test_every_container_chooses_its_own_devices_in_any_amount_of_capacity(
    other: DeviceRequest, want: str
) -> None:
    table = table_of(device("x"), device("y", index=1))
    request = pod(container(ask(), name="a"), container(other, name="b"))
    assert Verdicts(table).filter(request, ["n"]).feasible == []
    assert code(table, request) == want


def test_share_that_takes_a_whole_divided_device_keeps_the_pods_other_containers_off() -> None:
    whole_only = (Profile(name="", memory_mib=8, core_pct=100),)
    table = table_of(device("x", memory_mib=8, partitions=whole_only))
    request = pod(
        container(ask(mib=8), name="a", kind="sidecar"),
        container(replace(ask(mib=8), kind="fixed"), name="b"),
    )
    assert code(table, request) == "ExclusiveDeviceAllocateConflict"


@pytest.mark.parametrize(
    ("others", "request_", "want"),
    [
        (share("x", 30_000), pod(ask(mib=10_000)), None),
        (share("x", 30_000), pod(ask(mib=10_001)), "CardInsufficientMemory"),
        (share("x", 1, 60), pod(ask(core=40)), None),
        (share("x", 1, 60), pod(ask(core=41)), "CardInsufficientCore"),
        (share("x", 1, 100), pod(ask()), "CardComputeUnitsExhausted"),
        (share("x", 1, 99), pod(ask()), None),
        (share("x", 1, exclusive=True), pod(ask()), "ExclusiveDeviceAllocateConflict"),
        (share("x", 1), pod(ask(exclusive=True)), "ExclusiveDeviceAllocateConflict"),
        (share("x", 1), pod(ask(), device=("mutex",)), "ExclusiveDeviceAllocateConflict"),
        (share("x", 1), pod(whole()), "CardInsufficientMemory"),
    ],
)
def test_device_is_refused_for_shares_of_other_pods(
    others: Share, request_: PodRequest, want: str | None
) -> None:
    table = table_of(device("x"))
    table.book("n", [held(others)])
    assert code(table, request_) == want


def test_last_slot_is_given_and_no_further() -> None:
    table = table_of(device("x", slots=2))
    table.book("n", [held(share("x"))])
    assert code(table, pod(ask())) is None
    table.book("n", [held(share("x"))])
    assert code(table, pod(ask())) == "CardTimeSlicingExhausted"


def test_scaled_compute_does_not_switch_exclusiveness_off() -> None:
    table = table_of(device("x", core_pct=200, capacity_mib=80_000))
    assert placed(table, pod(whole())) == [["x"]]
    table.book("n", [held(share("x", 40_000, 100, exclusive=True))])
    assert code(table, pod(ask())) == "ExclusiveDeviceAllocateConflict"


def test_silent_agent_takes_its_vendors_devices_out() -> None:
    table = table_of(device("x"))
    table.upsert_node(devices("n", 1, vendor="ascend"))
    table.set_node_alive("n", "nvidia", alive=False)
    assert code(table, pod(ask())) == "NodeAgentSilent"
    assert code(table, pod(ask(vendor="ascend"))) is None
    table.set_node_alive("n", "nvidia", alive=True)
    assert code(table, pod(ask())) is None


# --- order of devices ----------------------------------------------------------------------------


def test_spread_takes_the_emptiest_and_binpack_the_fullest_that_fits() -> None:
    table = table_of(*(device(f"x{i}", index=i) for i in range(3)))
    table.book("n", [held(share("x0", 10_000))])
    table.book("n", [held(share("x1", 30_000))])
    assert placed(table, pod(ask(mib=5_000), device=("spread",))) == [["x2"]]
    assert placed(table, pod(ask(mib=5_000), device=("binpack",))) == [["x1"]]
    assert placed(table, pod(ask(mib=20_000), device=("binpack",))) == [["x0"]]
    assert placed(table, pod(ask(2, mib=5_000), device=("binpack",))) == [["x0", "x1"]]


def test_equal_devices_are_taken_by_numa_node_then_by_enumeration() -> None:
    table = table_of(
        device("a", index=0, numa=1), device("b", index=1, numa=0), device("c", index=2, numa=0)
    )
    assert placed(table, pod(ask())) == [["b"]]
    assert placed(table, pod(ask(2))) == [["b", "c"]]


def test_weights_define_utilization() -> None:
    table = table_of(device("a", index=0), device("b", index=1))
    table.book("n", [held(share("a", 20_000, 0))])
    table.book("n", [held(share("b", 1, 80))])
    by_memory = ScoringWeights(slot=0, core=0, memory=1)
    by_core = ScoringWeights(slot=0, core=1, memory=0)
    assert placed(table, pod(ask(), weights=by_memory)) == [["b"]]
    assert placed(table, pod(ask(), weights=by_core)) == [["a"]]


def test_policies_of_a_chain_apply_in_order() -> None:
    table = table_of(
        device("a", index=0, numa=0), device("b", index=1, numa=1), device("c", index=2, numa=1)
    )
    table.book("n", [held(share("b", 10_000))])
    assert placed(table, pod(ask(), device=("binpack", "numa"))) == [["b"]]
    assert placed(table, pod(ask(), device=("numa", "binpack"))) == [["a"]]
    assert placed(table, pod(ask(2), device=("numa",))) == [["b", "c"]]


def test_mutex_takes_idle_devices_but_leaves_them_to_other_pods() -> None:
    table = table_of(device("a", index=0), device("b", index=1))
    table.book("n", [held(share("a"))])
    found = pick(table, pod(ask(), device=("mutex", "binpack")), "n")
    assert isinstance(found, Placement)
    assert [s.uuid for c in found.containers for s in c.shares] == ["b"]
    table.book("n", found.containers)
    assert code(table, pod(ask())) is None
    assert code(table, pod(ask(), device=("mutex",))) == "ExclusiveDeviceAllocateConflict"


def three_containers() -> PodRequest:
    """The middle one fits beside either of the others, but those do not fit beside each other."""
    return pod(
        container(ask(mib=4, core=60), name="a"),
        container(ask(mib=6), name="b"),
        container(ask(mib=4, core=60), name="c"),
    )


@pytest.mark.parametrize("chain", [("spread",), ("binpack",), ("numa",)])
def test_every_choice_is_tried_before_a_pod_is_refused(chain: tuple[DevicePolicy, ...]) -> None:
    table = table_of(device("x", memory_mib=10), device("y", index=1, memory_mib=8))
    request = three_containers()
    request = replace(request, policy=replace(request.policy, device=chain))
    assert placed(table, request) in ([["x"], ["x"], ["y"]], [["y"], ["x"], ["x"]])
    table.book("n", [held(share("x", 1))])
    assert placed(table, request) == []


def test_choices_are_tried_up_to_a_bound() -> None:
    def plan(*counts: int) -> Plan:
        containers = (container(ask(count), name=f"c{i}") for i, count in enumerate(counts))
        return compile_request(pod(*containers))

    within = {8: [(1,) * 4, (2,) * 3, (4, 8), (3, 3)], 16: [(1,) * 3, (2, 2), (4, 16)]}
    beyond = {8: [(1,) * 5, (2,) * 4, (4, 4, 4)], 16: [(1,) * 4, (8, 8)]}
    assert all(is_searchable(width, plan(*c)) for width, all_ in within.items() for c in all_)
    assert not any(is_searchable(width, plan(*c)) for width, all_ in beyond.items() for c in all_)
    assert not is_searchable(8, plan(1))
    init = container(ask(4), name="i", kind="init")
    assert is_searchable(8, compile_request(pod(init, init, init, ask(), ask())))


def test_numa_bind_takes_all_devices_from_one_node() -> None:
    table = table_of(
        device("a", index=0, numa=0),
        device("b", index=1, numa=1),
        device("c", index=2, numa=1),
        device("d", index=3),
    )
    bound = DeviceSelector(numa_bind=True)
    assert placed(table, pod(ask(2), selector=bound)) == [["b", "c"]]
    assert placed(table, pod(ask(2))) == [["a", "d"]]
    assert code(table, pod(ask(3), selector=bound)) == "NumaNotFit"
    assert code(table, pod(ask(3))) is None


def test_numa_bind_holds_for_every_choice_that_is_tried() -> None:
    table = table_of(
        device("a", index=0, numa=1, memory_mib=12),
        device("b", index=1, numa=0, memory_mib=10),
        device("c", index=2, numa=0, memory_mib=10, slots=1),
    )
    request = pod(
        container(ask(2, mib=6), name="init", kind="init"),
        container(ask(mib=2), name="x"),
        container(ask(2, mib=4), name="y"),
        container(ask(mib=6), name="z"),
        device=("binpack",),
        selector=DeviceSelector(numa_bind=True),
    )
    assert placed(table, request) == [["b", "c"], ["a"], ["b", "c"], ["a"]]


def test_devices_of_unknown_affinity_count_as_one_numa_node() -> None:
    table = table_of(device("a", index=0), device("b", index=1))
    assert placed(table, pod(ask(2), selector=DeviceSelector(numa_bind=True))) == [["a", "b"]]


# --- topology ------------------------------------------------------------------------------------

PAIRS = (("a", "b", 300), ("c", "d", 300), ("a", "c", 10), ("b", "d", 10), ("a", "d", 10))


def four(**changes: int) -> DeviceTable:
    return table_of(
        *(device(u, index=i, numa=changes.get(u)) for i, u in enumerate("abcd")), links=PAIRS
    )


def test_several_devices_are_the_best_connected_set() -> None:
    table = four()
    table.book("n", [held(share("a", 39_500))])
    assert placed(table, pod(ask(2), device=("topology-aware",))) == [["c", "d"]]
    assert placed(table, pod(ask(2, mib=100), device=("topology-aware",))) == [["c", "d"]]
    packed = pod(ask(2, mib=100), device=("topology-aware", "binpack"))
    assert placed(table, packed) == [["a", "b"]]


def test_one_device_leaves_the_best_sets_whole() -> None:
    table = four()
    table.book("n", [held(share("a", 40_000))])
    assert placed(table, pod(ask(), device=("topology-aware",))) == [["b"]]
    assert placed(table, pod(ask(), device=("binpack",))) == [["b"]]


NVSWITCH, NVLINK, SAME_SWITCH, SAME_SOCKET, FAR = 1800, 400, 50, 30, 10


def machine(link: Callable[[int, int], int], count: int = 8) -> DeviceTable:
    """A node whose devices ``d0`` … are linked as in ``link``, half of them on each socket."""
    pairs = [(a, b) for a in range(count) for b in range(a)]
    return table_of(
        *(device(f"d{i}", index=i, numa=i * 2 // count) for i in range(count)),
        links=tuple((f"d{a}", f"d{b}", link(a, b)) for a, b in pairs),
    )


MACHINES = {
    "all on one switch": machine(lambda _a, _b: NVSWITCH),
    "bridged pairs": machine(lambda a, b: NVLINK if a // 2 == b // 2 else FAR),
    "two sockets": machine(lambda a, b: SAME_SOCKET if a // 4 == b // 4 else FAR),
    "switches under sockets": machine(
        lambda a, b: SAME_SWITCH if a // 2 == b // 2 else SAME_SOCKET if a // 4 == b // 4 else FAR
    ),
    "ring of four and pairs": machine(
        lambda a, b: NVLINK if max(a, b) < 4 or a // 2 == b // 2 else FAR
    ),
}


@pytest.mark.parametrize(
    ("kind", "busy", "count", "want"),
    [
        ("all on one switch", "", 4, "0123"),
        ("all on one switch", "03", 4, "1245"),
        ("bridged pairs", "0", 2, "23"),
        ("bridged pairs", "024", 2, "67"),
        ("bridged pairs", "0", 1, "1"),
        ("bridged pairs", "0", 4, "2345"),
        ("two sockets", "01", 4, "4567"),
        ("two sockets", "0", 3, "123"),
        ("two sockets", "0", 1, "1"),
        ("switches under sockets", "0", 2, "23"),
        ("switches under sockets", "0", 1, "1"),
        ("switches under sockets", "0", 4, "4567"),
        ("switches under sockets", "04", 3, "123"),
        ("ring of four and pairs", "", 2, "45"),
        ("ring of four and pairs", "", 4, "0123"),
        ("ring of four and pairs", "4", 1, "5"),
        ("ring of four and pairs", "46", 2, "01"),
    ],
)
def test_known_machines_give_the_closest_devices_and_keep_the_remaining_ones_close(
    kind: str, busy: str, count: int, want: str
) -> None:
    table = MACHINES[kind]
    shares = [held(*(share(f"d{i}", 40_000) for i in busy))]
    table.book("n", shares)
    found = placed(table, pod(ask(count), device=("topology-aware", "binpack")))
    table.unbook("n", shares)
    assert found == [[f"d{i}" for i in want]]


def test_even_links_leave_the_choice_to_the_chain() -> None:
    names = "abcd"
    links = tuple((x, y, 600) for x in names for y in names if x < y)
    table = table_of(*(device(u, index=i) for i, u in enumerate(names)), links=links)
    table.book("n", [held(share("c", 100))])
    assert placed(table, pod(ask(2), device=("topology-aware", "binpack"))) == [["a", "c"]]
    assert placed(table, pod(ask(1), device=("topology-aware", "binpack"))) == [["c"]]


def test_numa_bind_limits_the_sets_to_one_numa_node() -> None:
    table = four(a=0, b=1, c=0, d=1)
    bound = DeviceSelector(numa_bind=True)
    request = pod(ask(2), device=("topology-aware",), selector=bound)
    assert placed(table, request) == [["a", "c"]]


# --- whole pods ----------------------------------------------------------------------------------


def test_init_container_and_application_take_turns_on_one_device() -> None:
    table = table_of(device("x"))
    request = pod(
        container(ask(mib=40_000), name="i", kind="init"),
        container(ask(mib=40_000), name="a"),
    )
    assert placed(table, request) == [["x"], ["x"]]


def test_whole_device_serves_init_container_and_then_the_application() -> None:
    table = table_of(device("x"))
    request = pod(container(whole(), name="i", kind="init"), container(whole(), name="a"))
    found = pick(table, request, "n")
    assert isinstance(found, Placement)
    table.book("n", found.containers)
    usage = table.usage("n", "x")
    assert usage is not None
    assert (usage.memory_mib, usage.slots, usage.exclusive_holders) == (40_000, 1, 1)


def test_sidecar_stays_beside_the_application_and_later_init_containers() -> None:
    table = table_of(device("x"))
    sidecar = container(ask(mib=15_000), name="s", kind="sidecar")
    assert placed(table, pod(sidecar, container(ask(mib=25_000), name="a"))) == [["x"], ["x"]]
    assert code(table, pod(sidecar, container(ask(mib=25_001), name="a"))) is not None
    late = container(ask(mib=25_001), name="i", kind="init")
    early = pod(late, sidecar, container(ask(mib=1), name="a"))
    assert placed(table, early) == [["x"], ["x"], ["x"]]
    assert code(table, pod(sidecar, late, container(ask(mib=1), name="a"))) is not None


def test_applications_add_up_and_need_different_slots() -> None:
    table = table_of(device("x", slots=1), device("y", index=1, slots=1))
    two = pod(container(ask(), name="a"), container(ask(), name="b"))
    assert placed(table, two) == [["x"], ["y"]]
    three = pod(*(container(ask(), name=name) for name in "abc"))
    assert code(table, three) == "CardTimeSlicingExhausted"


def test_exclusive_share_keeps_the_pods_own_containers_off() -> None:
    table = table_of(device("x"), device("y", index=1))
    request = pod(
        container(ask(exclusive=True), name="a"),
        container(ask(), name="b"),
        device=("binpack",),
    )
    assert placed(table, request) == [["x"], ["y"]]
    assert code(table_of(device("x")), request) == "ExclusiveDeviceAllocateConflict"
    backwards = pod(container(ask(), name="a"), container(ask(exclusive=True), name="b"))
    assert code(table_of(device("x")), backwards) == "ExclusiveDeviceAllocateConflict"


def test_spread_preference_does_not_refuse_a_pod_that_fits() -> None:
    table = table_of(device("x"), device("y", index=1))
    table.book("n", [held(share("x", 20_000))])
    request = pod(
        container(ask(mib=10_000), name="small"), container(ask(mib=40_000), name="large")
    )
    assert placed(table, request) == [["x"], ["y"]]


def test_two_vendors_in_one_container() -> None:
    table = table_of(device("x"))
    table.upsert_node(devices("n", 2, vendor="ascend"))
    request = pod(container(ask(), ask(2, vendor="ascend")))
    assert placed(table, request) == [["x", "n-ascend-0", "n-ascend-1"]]


def test_next_container_sees_the_shares_of_the_previous_one() -> None:
    table = table_of(device("x"), device("y", index=1))
    small = tuple(container(ask(mib=100), name=name) for name in "abc")
    assert placed(table, pod(*small)) == [["x"], ["y"], ["x"]]
    assert placed(table, pod(*small, device=("binpack",))) == [["x"], ["x"], ["x"]]


def test_pod_without_a_request_gets_no_device() -> None:
    table = table_of(device("x"))
    assert pick(table, pod(), "n") == Placement(node="n", containers=())
    assert isinstance(pick(table, pod(), "other"), NodeRefusal)


# --- pick ----------------------------------------------------------------------------------------


def test_shares_contain_requested_amounts_and_percentages_in_mib() -> None:
    table = table_of(device("x", memory_mib=40_001, capacity_mib=80_000))
    found = pick(table, pod(container(ask(pct=50, core=30), name="c", priority=1)), "n")
    assert found == Placement(
        node="n",
        containers=(
            ContainerShares(name="c", kind="app", shares=(share("x", 20_000, 30),), priority=1),
        ),
    )


def test_own_holding_can_be_left_aside() -> None:
    table = table_of(device("x"))
    mine = (held(share("x", 30_000)),)
    table.book("n", mine)
    request = pod(ask(mib=35_000))
    assert code(table, request) == "CardInsufficientMemory"
    found = pick(table, request, "n", without=mine)
    assert isinstance(found, Placement)
    usage = table.usage("n", "x")
    assert usage is not None
    assert usage.memory_mib == 30_000
    table.check()


def test_unknown_node_is_refused() -> None:
    found = pick(table_of(device("x")), pod(ask()), "other")
    assert isinstance(found, NodeRefusal)
    assert found.code == "NodeUnregistered"


@pytest.mark.parametrize(
    ("containers", "want"),
    [
        ((held(share("x", 5_000, 10)),), True),
        ((held(share("y", 5_000, 10)),), True),
        ((held(share("x", 5_001, 10)),), False),
        ((held(share("x", 5_000, 11)),), False),
        ((held(share("x", 5_000, 10, exclusive=True)),), False),
        ((held(share("x", 5_000, 10), share("y", 5_000, 10)),), False),
        ((held(share("x", 5_000, 10), share("z", vendor="ascend")),), False),
        ((held(share("x", 5_000, 10), name="other"),), False),
        ((held(share("x", 5_000, 10), kind="init"),), False),
        ((held(share("other", 5_000, 10)),), False),
        ((held(share("sick", 5_000, 10)),), False),
        ((held(),), False),
        ((), False),
    ],
)
def test_reservation_suits_only_the_request_it_was_made_for(
    containers: tuple[ContainerShares, ...], *, want: bool
) -> None:
    table = table_of(device("x"), device("y", index=1), device("sick", index=2, healthy=False))
    request = pod(ask(mib=5_000, core=10))
    assert satisfies(table, request, "n", containers) is want
    assert not satisfies(table, request, "other", containers)


@pytest.mark.parametrize("nodes", [1, 20])
def test_share_is_at_most_what_a_recalled_device_has_itself(nodes: int) -> None:
    """With twenty nodes the verdict comes from ranked capacity, with one from its devices."""
    table = DeviceTable()
    for number in range(nodes):
        recalled = device(f"r-{number}", capacity_mib=80_000, largest_mib=40_000)
        table.upsert_node(node_devices(f"n-{number}", [recalled]))
    table.upsert_node(node_devices("managed", [device("m", capacity_mib=80_000)]))
    names = [*(f"n-{number}" for number in range(nodes)), "managed"]
    assert Verdicts(table).filter(pod(ask(mib=40_000)), names).feasible == names
    assert Verdicts(table).filter(pod(ask(mib=40_001)), names).feasible == ["managed"]
    table.book("n-0", [held(share("r-0", 40_000))])
    assert "n-0" in Verdicts(table).filter(pod(ask(mib=40_000)), names).feasible


def test_larger_share_of_a_pods_other_container_is_refused_too() -> None:
    table = table_of(device("x", capacity_mib=200_000, largest_mib=40_000))
    small, large = container(ask(mib=10), name="a"), container(ask(mib=50_000), name="b")
    assert code(table, pod(small, large)) == "CardShareTooLarge"
    assert code(table, pod(large, small)) == "CardShareTooLarge"


@pytest.mark.parametrize(
    ("here", "want"),
    [
        (device("x"), None),
        (device("x", capacity_mib=80_000), "CardOvercommitted"),
        (device("x", capacity_mib=80_000, largest_mib=40_000), "CardOvercommitted"),
        (device("x", core_pct=200), "CardOvercommitted"),
        (device("x", capacity_mib=20_000), None),
    ],
)
def test_guaranteed_share_is_on_no_overcommitted_device(here: Device, want: str | None) -> None:
    guaranteed = pod(ask(mib=10_000), selector=DeviceSelector(no_overcommit=True))
    assert code(table_of(here), guaranteed) == want
    assert code(table_of(here), pod(ask(mib=10_000))) is None


MIG = Profile(name="1g.10gb", memory_mib=9_728, core_pct=14, resources={"slices": 1})
MPS = DeviceSelector(modes=("mps",))
LIMITED = replace(ask(mib=10_000, core=30), memory_limit_mib=30_000, core_limit_pct=60)


@pytest.mark.parametrize(
    ("here", "request_", "want"),
    [
        (device("x"), pod(LIMITED), (30_000, 60)),
        (device("x"), pod(replace(LIMITED, memory_limit_mib=90_000)), (40_000, 60)),
        (device("x"), pod(replace(LIMITED, memory_limit_mib=10_000)), (0, 60)),
        (device("x"), pod(replace(LIMITED, core_limit_pct=30)), (30_000, 30)),
        (device("x"), pod(replace(LIMITED, core_pct=0)), (30_000, 0)),
        (device("x"), pod(replace(LIMITED, memory_mib=0, memory_pct=50)), (30_000, 60)),
        (device("x"), pod(replace(LIMITED, memory_mib=0, memory_pct=80)), (0, 60)),
        (device("x", capacity_mib=35_000, foreign_mib=9_000), pod(LIMITED), (30_000, 60)),
        (device("x", core_pct=200), pod(LIMITED), (30_000, 60)),
        (device("x", capacity_mib=80_000), pod(LIMITED), (0, 60)),
        (device("x", capacity_mib=80_000, largest_mib=40_000), pod(LIMITED), (0, 60)),
        (device("x"), pod(replace(LIMITED, exclusive=True)), (0, 0)),
        (device("x", mode="mps"), pod(LIMITED, selector=MPS), (0, 0)),
        (
            device("x", mode="mig", partitions=(MIG,), resources={"slices": 7}),
            pod(replace(LIMITED, memory_mib=5_000, core_pct=10)),
            (0, 0),
        ),
    ],
    ids=[
        "soft",
        "at most the device",
        "equal to the request",
        "compute equal to the request",
        "no compute",
        "below in percent",
        "above in percent",
        "reserve",
        "compute overcommitted",
        "memory overcommitted",
        "recall",
        "exclusive",
        "mps",
        "partition",
    ],
)
def test_share_has_the_limits_above_its_request_that_its_device_has(
    here: Device, request_: PodRequest, want: tuple[int, int]
) -> None:
    table = table_of(here)
    found = pick(table, request_, "n")
    assert isinstance(found, Placement), found
    (one,) = found.containers[0].shares
    assert (one.memory_limit_mib, one.core_limit_pct) == want
    assert satisfies(table, request_, "n", found.containers)
    plain = replace(one, memory_limit_mib=0, core_limit_pct=1)
    shares = (replace(found.containers[0], shares=(plain,)),)
    assert satisfies(table, request_, "n", shares)
    assert with_limits(table, request_, "n", shares) == found.containers
    table.book("n", found.containers)
    usage = table.usage("n", "x")
    assert usage is not None
    assert usage.memory_mib == one.memory_mib


def test_limits_are_those_of_the_alternative_that_the_shares_satisfy() -> None:
    table = table_of(device("x"))
    other = pod(replace(LIMITED, memory_mib=20_000, core_limit_pct=0))
    request = replace(pod(LIMITED), others=(Choice(containers=other.containers),))
    (found,) = with_limits(table, request, "n", (held(share("x", 20_000, 30)),))
    assert [(one.memory_limit_mib, one.core_limit_pct) for one in found.shares] == [(30_000, 0)]


def test_pod_that_takes_held_shares_over_has_its_own_limits() -> None:
    ledger = Ledger(table_of(device("x")))
    plain = pod(replace(LIMITED, memory_limit_mib=0, core_limit_pct=90), uid=hold_uid("w", 0, 0))
    hold = Hold(held_for=purpose_of("workload", "default", "w"), lease_s=60.0)
    held_ = ledger.plan_hold(plain, "n", allocation_id="h", now_s=0.0, hold=hold)
    assert isinstance(held_, Append)
    ledger.handle(Accepted(append=held_, seq=1, now_s=0.0))
    taken = ledger.plan_take(
        pod(LIMITED, uid="p"), "n", held_uid=plain.uid, allocation_id="p", now_s=1.0
    )
    assert isinstance(taken, Append)
    assert taken.record.awaits == (plain.uid,)
    (one,) = taken.record.containers[0].shares
    assert (one.memory_limit_mib, one.core_limit_pct) == (30_000, 60)
