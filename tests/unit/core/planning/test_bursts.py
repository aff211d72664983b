# SPDX-License-Identifier: Apache-2.0
"""Choice of the pods with bursts whose eviction returns memory that a device lacks."""

from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import RecordSeen
from hami_core.planning.bursts import Shortage, shortages
from hami_core.table.table import DeviceTable
from tests.support.builders import device, held, node_devices, share

MIB = 10_000


def pod(uid: str, priority: int = 0, **more: str) -> PodFacts:
    return PodFacts(
        uid=uid,
        namespace="default",
        name=uid,
        resource_version="1",
        node="n",
        priority=priority,
        group=more.get("group", ""),
    )


class Site:
    """One node with two devices; each pod has 2,000 MiB of the first one."""

    def __init__(self, *pods: PodFacts, **bursts: int) -> None:
        self.pods = {one.uid: one for one in pods}
        self.table = DeviceTable()
        first = device("x", memory_mib=MIB, bursts=bursts)
        self.table.upsert_node(node_devices("n", [first, device("y", memory_mib=MIB)]))
        self.ledger = Ledger(self.table, writer="w")
        for number, uid in enumerate(self.pods, start=1):
            self.reserve(uid, number)

    def reserve(self, uid: str, revision: int, *awaits: str) -> None:
        record = AllocationRecord(
            op="reserve",
            allocation_id=f"a-{uid}",
            node="n",
            pod_uid=uid,
            namespace="default",
            pod=uid,
            containers=(held(share("x", 2_000)),),
            time_s=0.0,
            lease_s=30.0,
            writer="w",
            awaits=awaits,
            held_for="preemption" if awaits else "",
        )
        self.ledger.handle(RecordSeen(record=record, seq=revision, now_s=0.0))

    def short(self) -> list[Shortage]:
        return shortages(
            self.ledger,
            pod_of=self.pods.get,
            members_of=lambda group: [one for one in self.pods.values() if one.group == group],
        )

    def victims(self, *spared: str) -> list[str]:
        (shortage,) = self.short()
        found = shortage.victims(lambda pod: pod.uid in spared)
        return [pod.uid for burst in found for pod in burst.leaves]


def test_lowest_priority_leaves_first_then_the_largest_burst_until_the_rest_fits() -> None:
    site = Site(pod("a", 5), pod("b", 1), pod("c", 1), pod("d"), a=3_000, b=800, c=1_000)
    (shortage,) = site.short()
    assert (shortage.node, shortage.uuid, shortage.short_mib) == ("n", "x", 2_800)
    assert [burst.pod.uid for burst in shortage.bursts] == ["c", "b", "a"]
    assert site.victims() == ["c"]  # 3,000 MiB with its share
    assert site.victims("c") == ["b"]
    assert site.victims("b", "c") == ["a"]
    assert site.victims("a", "b", "c") == []


def test_pod_beyond_its_equal_part_leaves_before_those_within_it() -> None:
    # 2,000 MiB are left for three bursts; 700 for each of the two larger ones beside ``b``.
    site = Site(pod("a", 5), pod("b", 1), pod("c", 9), pod("d"), a=3_000, b=600, c=701)
    assert [burst.pod.uid for burst in site.short()[0].bursts] == ["a", "c", "b"]
    site = Site(pod("a", 5), pod("b", 1), pod("c", 9), pod("d"), a=3_000, b=600, c=700)
    assert [burst.pod.uid for burst in site.short()[0].bursts] == ["a", "b", "c"]
    # Requests alone are more than the device has: nothing is left for any.
    site = Site(*(pod(uid) for uid in "abcdef"), a=100, b=200)
    assert [burst.pod.uid for burst in site.short()[0].bursts] == ["b", "a"]


def test_several_bursts_end_where_one_is_not_enough() -> None:
    site = Site(pod("a", 5), pod("b", 1), pod("c", 1), pod("d"), a=4_000, b=1_500, c=1_000)
    assert site.victims() == ["b", "c"]


def test_device_that_has_what_its_shares_and_bursts_need_is_not_short() -> None:
    assert Site(pod("a"), pod("b"), a=6_000).short() == []


def test_pods_that_leave_anyway_do_not_count() -> None:
    site = Site(pod("a", 5), pod("b", 1), a=4_000, b=4_000, gone=1_000)
    assert site.short()[0].short_mib == 2_000
    site.pods["b"] = replace(site.pods["b"], is_deleting=True)
    assert site.short() == []


def test_reservation_beside_its_victims_makes_no_device_short() -> None:
    site = Site(pod("a", 5), pod("b", 1), pod("c"), pod("d"), a=2_000)
    site.reserve("preemptor", 9, "b")
    assert site.short() == []
    site.reserve("second", 10, "c", "d")
    site.reserve("third", 11, "c", "d")
    assert site.short() == []
    site.reserve("fourth", 12, "c")
    assert site.victims() == ["a"]


def test_members_of_a_gang_leave_together_and_count_with_their_highest_priority() -> None:
    site = Site(
        pod("a", 5), pod("b", 1, group="g"), pod("c", 9, group="g"), pod("d"), a=2_000, b=2_500
    )
    assert site.victims() == ["a"]
    assert site.victims("a") == ["b", "c"]
    assert site.victims("a", "c") == []
