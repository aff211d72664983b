# SPDX-License-Identifier: Apache-2.0
"""The agent's comparison of its grants with kubelet's list."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.runtime.trustedkeys import TrustedKeys
from hami_nodeagent.core.claims import ListedPod
from hami_nodeagent.shell.allocate import GrantKeeper
from hami_nodeagent.shell.check import SelfCheck
from hami_nodeagent.shell.limiter import Limiter
from tests.unit.nodeagent.core.builders import GPU, Given
from tests.unit.nodeagent.shell.support import FakeKubelet, FakePods, know, make_site

pytestmark = pytest.mark.anyio


class Bench:
    def __init__(self, directory: Path) -> None:
        self.site = make_site(directory)
        self.kubelet = FakeKubelet()
        self.pods = FakePods()
        self.keys_directory = directory / "keys"
        self.check = SelfCheck(
            site=self.site,
            kubelet=self.kubelet,  # type: ignore[arg-type]  # a stand-in with the one method used
            pods=self.pods,  # type: ignore[arg-type]  # as above
            keys=TrustedKeys(self.keys_directory),
            keeper=GrantKeeper(self.site),
            limiter=Limiter(self.site),
            vendor_by_resource={GPU: "nvidia"},
        )

    def grant(self, pod: Given, *ids: str) -> None:
        self.site.picture.grants.add(pod.grant("main", *ids))


async def test_agreement_changes_nothing(tmp_path: Path) -> None:
    bench, pod = Bench(tmp_path), Given("pod")
    know(bench.site, pod)
    bench.grant(pod, "a")
    bench.kubelet.pods = [pod.listed({"main": {GPU: {"a"}}})]
    await bench.check.check()
    assert bench.site.picture.failures_by_uid == {}
    assert len(bench.site.picture.grants) == 1
    assert bench.kubelet.list_count == 1


async def test_mismatch_that_lasts_fails_both_allocations(tmp_path: Path) -> None:
    bench, one, two = Bench(tmp_path), Given("one"), Given("two")
    know(bench.site, one, two)
    bench.grant(one, "a")
    bench.grant(two, "b")
    bench.kubelet.pods = [one.listed({"main": {GPU: {"b"}}}), two.listed({"main": {GPU: {"a"}}})]
    await bench.check.check()
    await bench.check.check()
    failures = bench.site.picture.failures_by_uid
    assert {failure.code for failure in failures.values()} == {"device-mismatch"}
    assert set(failures) == {one.uid, two.uid}
    assert "granted to container main of pod default/two" in failures[one.uid].reason
    assert bench.site.metrics.mismatches._value.get() == 2  # noqa: SLF001


async def test_grants_by_claims_end_when_kubelet_unprepares_them(tmp_path: Path) -> None:
    bench, pod = Bench(tmp_path), Given("pod", finished=True)
    pod.entry = replace(pod.entry, record=replace(pod.record, op="release", claim="c"))
    know(bench.site, pod)
    bench.site.picture.grants.add(replace(pod.grant("main"), claim="c"))
    bench.site.picture.pods.end(pod.uid, now_s=0)
    await bench.check.check()
    bench.site.picture.pods.forget(gone_before_s=1)
    await bench.check.check()
    assert len(bench.site.picture.grants) == 1
    assert pod.uid in bench.site.picture.entries_by_uid
    bench.site.picture.grants.drop_pod(pod.uid)
    await bench.check.check()
    assert pod.uid not in bench.site.picture.entries_by_uid


async def test_transient_mismatch_is_not_reported(tmp_path: Path) -> None:
    bench, pod = Bench(tmp_path), Given("pod")
    know(bench.site, pod)
    bench.grant(pod, "a")

    class Changing(FakeKubelet):
        async def list(self, *, timeout_s: float | None = None) -> tuple[ListedPod, ...]:
            ids = "old" if self.list_count == 0 else "a"
            self.pods = [pod.listed({"main": {GPU: {ids}}})]
            return await super().list(timeout_s=timeout_s)

    bench.check._kubelet = Changing()  # type: ignore[assignment]  # noqa: SLF001
    await bench.check.check()
    assert bench.site.picture.failures_by_uid == {}


async def test_containers_of_a_lost_book_are_adopted(tmp_path: Path) -> None:
    bench, pod = Bench(tmp_path), Given("pod", ("main", "app", {GPU: 2}))
    unknown = Given("unknown")
    know(bench.site, pod, unknown)
    del bench.site.picture.entries_by_uid[unknown.uid]
    bench.kubelet.pods = [
        pod.listed({"main": {GPU: {"x", "y"}}}),
        unknown.listed({"main": {GPU: {"z"}}}),
    ]
    await bench.check.check()
    grants = list(bench.site.picture.grants)
    assert [(grant.pod, grant.ids, grant.adopted) for grant in grants] == [
        ("pod", ("x", "y"), True)
    ]
    assert grants[0].uuids == ("nvidia-0", "nvidia-1")
    assert list(bench.site.checkpoint.load_grants()) == grants


async def test_container_that_holds_another_number_than_recorded_is_not_adopted(
    tmp_path: Path,
) -> None:
    bench, pod, released = Bench(tmp_path), Given("pod"), Given("released")
    released.entry = replace(released.entry, record=replace(released.record, op="release"))
    know(bench.site, pod, released)
    bench.kubelet.pods = [
        pod.listed({"main": {GPU: {"x", "y"}}}),
        released.listed({"main": {GPU: {"z"}}}),
    ]
    await bench.check.check()
    assert len(bench.site.picture.grants) == 0


async def test_container_of_hamis_is_adopted_even_if_its_share_counts_twice(tmp_path: Path) -> None:
    bench, pod = Bench(tmp_path), Given("pod", ("main", "app", {GPU: 2}))
    pod.entry = replace(pod.entry, record=replace(pod.record, origin="hami"))
    know(bench.site, pod)
    bench.kubelet.pods = [pod.listed({"main": {GPU: {"x"}}})]
    await bench.check.check()
    assert [(grant.pod, grant.ids) for grant in bench.site.picture.grants] == [("pod", ("x",))]


async def test_grants_end_with_their_pods(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    alive, finished = Given("alive"), Given("finished", finished=True)
    gone, lingering, unknown = Given("gone", gone=True), Given("lingering", gone=True), Given("x")
    know(bench.site, alive, finished, gone, lingering)
    for pod in (alive, finished, gone, lingering, unknown):
        bench.grant(pod, f"id-{pod.name}")
        bench.site.checkpoint.write_limits(pod.grant("main", "a"), "text")
    bench.kubelet.pods = [finished.listed(), lingering.listed({"main": {GPU: {"id-lingering"}}})]
    await bench.check.check()
    assert bench.site.picture.grants.pod_uids() == {alive.uid, lingering.uid}
    assert {path.name for path in (tmp_path / "limits").iterdir()} == {alive.uid, lingering.uid}


async def test_grants_end_when_a_later_pod_of_the_name_holds_none_of_their_ids(
    tmp_path: Path,
) -> None:
    """A pod by claim holds no ids, and would wait for these shares."""
    bench = Bench(tmp_path)
    old, new = Given("db-0", uid="old", gone=True), Given("db-0", uid="new", sequence=2)
    know(bench.site, old, new)
    now_s = bench.site.clock.now_s()
    bench.site.picture.grants.add(replace(old.grant("main", "a"), time_s=now_s))
    bench.kubelet.pods = [new.listed()]
    await bench.check.check()
    assert len(bench.site.picture.grants) == 1, "kubelet may not have listed it yet"
    bench.site.picture.grants.drop_pod(old.uid)
    old_s = now_s - bench.site.settings.check_s
    bench.site.picture.grants.add(replace(old.grant("main", "a"), time_s=old_s))
    await bench.check.check()
    assert len(bench.site.picture.grants) == 0
    over = bench.site.picture.pods.find(old.uid)
    assert over is not None
    assert over.finished, "a third pod of the name is not taken for the first"


async def test_unavailable_kubelet_ends_no_grant(tmp_path: Path) -> None:
    bench, gone = Bench(tmp_path), Given("gone", gone=True)
    know(bench.site, gone)
    bench.grant(gone, "a")
    bench.kubelet.pods = None
    await bench.check.check()
    assert len(bench.site.picture.grants) == 1


async def test_records_of_releases_are_dropped_with_their_pods(tmp_path: Path) -> None:
    bench, pod = Bench(tmp_path), Given("pod")
    bench.site.picture.entries_by_uid[pod.uid] = replace(
        pod.entry, record=replace(pod.record, op="release")
    )
    bench.site.picture.states_by_uid[pod.uid] = pod.state("running")
    await bench.check.check()
    assert bench.site.picture.entries_by_uid == {}
    assert bench.site.picture.states_by_uid == {}


async def test_each_check_learns_the_kind_of_kubelets_list(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in range(3):
        await bench.check.check()
    assert len(bench.pods.kind_reads) == 3


async def test_changed_keys_verify_all_pods_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.check.check()
    assert "judged" not in bench.pods.confirmed
    bench.keys_directory.mkdir()
    (bench.keys_directory / "a.pub").write_text("not a key")
    await bench.check.check()
    assert "judged" in bench.pods.confirmed


async def test_names_of_two_pods_are_left_out_until_one_is_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    old, new = Given("db-0", uid="old"), Given("db-0", uid="new", sequence=2)
    know(bench.site, old, new)
    bench.grant(old, "a")
    bench.kubelet.pods = [new.listed({"main": {GPU: {"b"}}})]
    await bench.check.check()
    assert bench.site.picture.failures_by_uid == {}
