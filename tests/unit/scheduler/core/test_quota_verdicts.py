# SPDX-License-Identifier: Apache-2.0
"""What quotas leave of filter's answer, and how much of it a pod is told."""

from hami_common.events.allocation import Account
from hami_scheduler.core.queues import QueueConfig, QueueTree
from hami_scheduler.core.quota import NOBODY_SPECIAL, Asker, Limit, Quota, Resource
from hami_scheduler.core.quota_ledger import QuotaLedger
from hami_scheduler.core.quota_verdicts import TOLD_BYTES, Allowed, QuotaVerdicts
from hami_scheduler.core.table import DeviceTable
from hami_scheduler.core.verdicts import Verdicts
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


def test_pod_is_told_of_its_quota_and_of_devices_within_one_kibibyte_at_5000_nodes() -> None:
    """Devices of several sizes, so that a percentage comes to several amounts, and all else."""
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


def test_few_reasons_are_all_told() -> None:
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


def test_looking_notes_nothing_and_being_refused_for_borrowing_does() -> None:
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
