# SPDX-License-Identifier: Apache-2.0
"""Effect of quotas on filter's answer, and the part of it that a pod's Event contains."""

from msgspec.structs import replace

from hami_common.events.allocation import Account
from hami_core.placement.verdicts import Verdicts
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.queues import QueueConfig, QueueTree
from hami_core.quota.resourcequota import NOBODY_SPECIAL, Asker, Limit, Quota, Resource
from hami_core.quota.verdicts import TOLD_BYTES, Allowed, QuotaVerdicts
from hami_core.table.table import DeviceTable
from hami_sim.kubescheduler.fit import NodeRefusal as Told
from hami_sim.kubescheduler.fit import explain
from tests.support.builders import ask, container, device, node_devices, pod

NODES, TIMES = 260, 20
"""Texts do not depend on how many nodes have the same reason: each stands for twenty."""
KEY = "limits.nvidia.com/gpumem"


def ledger_of(most_mib: int, *, name: str = "q") -> QuotaLedger:
    found = QuotaLedger()
    limits = {Resource("nvidia", "memory_mib"): Limit(key=KEY, most=most_mib)}
    found.put_quota(Quota(namespace="default", name=name, limits=limits))
    return found


def test_quota_and_devices_are_reported_within_one_kibibyte_at_5000_nodes() -> None:
    """Devices of several sizes, so that a percentage equals several amounts, and of all kinds."""
    long = "a-rather-long-node-name-as-clouds-like-them.region.example"
    table = DeviceTable()
    for number in range(NODES):
        kinds = (
            *(device(f"d{number}", memory_mib=10_000 + 1_000 * size) for size in range(8)),
            device(f"d{number}", healthy=False),
            device(f"d{number}", cordoned=True),
            device(f"d{number}", mode="mig"),
            device(f"d{number}", type="T4"),
            device(f"d{number}", slots=0),
        )
        some = kinds[number % len(kinds)]
        table.upsert_node(node_devices(f"{long}-{number}", [some]))
    request = pod(container(ask(pct=50, core=10), name="c" * 63))
    verdicts = QuotaVerdicts(table, ledger_of(100, name="n" * 60))
    filtered = Verdicts(table).filter(request, table.nodes())
    answer = verdicts.allowed(request, filtered, NOBODY_SPECIAL, waiting=())
    assert isinstance(answer, Allowed)
    assert not len(answer.left)
    groups = answer.groups()
    texts = {refusal.text for refusal, _ in groups}
    assert sum(len(places) for _, places in groups) == NODES
    assert any(text.startswith("ResourceQuotaNotFit") for text in texts)
    (rest,) = (text for text in texts if text.startswith("OtherReasons"))
    assert (
        rest == f"OtherReasons: {len(answer.classes()) - len(texts) + 1} more, see hamictl explain"
    )
    assert sum(len(text.encode()) for text in texts - {rest}) <= TOLD_BYTES
    told = {
        f"{place}.{copy}": Told(reasons=(refusal.text,))
        for refusal, places in groups
        for place in places.tolist()
        for copy in range(TIMES)
    }
    assert len(told) == NODES * TIMES > 5_000
    assert 500 < len(explain(told, len(told), preempts=True).encode()) <= 1024


def test_few_reasons_are_all_reported() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("big", [device("b", memory_mib=40_000)]))
    table.upsert_node(node_devices("small", [device("s", memory_mib=1_000)]))
    request = pod(ask(mib=5_000))
    filtered = Verdicts(table).filter(request, ["big", "small", "nowhere"])
    answer = QuotaVerdicts(table, ledger_of(4_000)).allowed(
        request, filtered, NOBODY_SPECIAL, waiting=()
    )
    codes = {answer.nodes.string(int(at)): r.code for r, places in answer.groups() for at in places}
    assert codes == {
        "big": "ResourceQuotaNotFit",
        "small": "CardInsufficientMemory",
        "nowhere": "NodeUnregistered",
    }


def test_only_a_refusal_for_borrowing_records_demand() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("d")]))
    quota = QuotaLedger()
    queue = QueueConfig(name="a", guaranteed={"memory_mib": 10}, namespaces=("default",))
    quota.set_tree(QueueTree([queue]))
    verdicts, asker = QuotaVerdicts(table, quota), Asker(account=Account(queue="a"))
    request = pod(ask(mib=20), uid="u")
    filtered = Verdicts(table).filter(request, ["n"])
    answer, wanted = verdicts.look(request, filtered, asker, waiting=())
    assert not len(answer.left)
    assert wanted is not None
    assert quota.claims() == {}
    verdicts.allowed(request, filtered, asker, waiting=())
    assert quota.claims().keys() == {"u"}
    smaller = pod(ask(mib=10), uid="u")
    assert len(verdicts.allowed(smaller, filtered, asker, waiting=("u",)).left) == 1
    assert quota.claims() == {}


def told_of_priority(priority: int | None, *queues: QueueConfig, wish: str = "") -> set[str]:
    """Codes of the answer to a pod of this task priority."""
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("d")]))
    quota = QuotaLedger()
    quota.set_tree(QueueTree(queues))
    plain = pod(ask(mib=20), uid="u")
    first = replace(plain.containers[0], priority=priority)
    request = replace(plain, containers=(first,))
    answer = QuotaVerdicts(table, quota).allowed(
        request,
        Verdicts(table).filter(request, ["n"]),
        Asker(account=Account(queue=wish), wish=wish),
        waiting=(),
    )
    return {refusal.text for refusal, _ in answer.groups()}


EVERYBODY = QueueConfig(name="all", namespaces=("*",), task_priority_floor=1)


def test_task_priority_above_the_floor_of_the_queue_is_refused_with_the_fix() -> None:
    (text,) = told_of_priority(0, EVERYBODY)
    assert text == (
        "TaskPriorityTooHigh: container main: priority 0; queue all allows 1 to 7: write "
        "nvidia.com/priority: 1"
    )
    for allowed in (1, 7, None):
        assert told_of_priority(allowed, EVERYBODY) == set()


def test_pod_that_writes_no_task_priority_has_the_default_one() -> None:
    low = QueueConfig(name="low", namespaces=("*",), task_priority_floor=3)
    (text,) = told_of_priority(None, low)
    assert "priority 1; queue low allows 3 to 7" in text


def test_floor_of_a_queue_holds_for_those_below_it() -> None:
    top = QueueConfig(name="top", task_priority_floor=2)
    below = QueueConfig(name="below", parent="top", namespaces=("*",), task_priority_floor=1)
    assert len(told_of_priority(1, top, below)) == 1
    assert told_of_priority(2, top, below) == set()


def test_queue_without_a_floor_takes_every_task_priority() -> None:
    may = QueueConfig(name="may", allowed_namespaces=("default",))
    assert told_of_priority(0, QueueConfig(name="all", namespaces=("*",))) == set()
    assert told_of_priority(0, EVERYBODY, may, wish="may") == set()
    assert told_of_priority(0) == set()
