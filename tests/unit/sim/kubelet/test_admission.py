# SPDX-License-Identifier: Apache-2.0
"""Checks that kubelet repeats at admission, and their messages."""

from decimal import Decimal

from hami_sim.kubelet.admission import Refusal, allocate_failed, check_fit
from hami_sim.kubelet.objects import Amounts, Obj

NODE: Obj = {"metadata": {"labels": {"zone": "a"}}, "spec": {}}
ROOM = {"cpu": Decimal(4), "memory": Decimal(1000), "pods": Decimal(3), "x.io/gpu": Decimal(2)}


def amounts(**values: str) -> Amounts:
    return {name.replace("__", "/").replace("_", "."): Decimal(v) for name, v in values.items()}


def check(
    requests: Amounts,
    others: list[Amounts] | None = None,
    *,
    spec: Obj | None = None,
    node: Obj = NODE,
) -> Refusal | None:
    pod = {"metadata": {}, "spec": spec or {}}
    return check_fit(pod, requests, node=node, allocatable=ROOM, others=others or [])


def test_fitting_pod_is_taken() -> None:
    assert check(amounts(cpu="4", memory="1000")) is None


def test_cpu_is_reported_in_thousandths() -> None:
    refusal = check(amounts(cpu="3"), [amounts(cpu="1.5")])
    assert refusal == Refusal(
        reason="OutOfcpu",
        message="Node didn't have enough resource: cpu, "
        "requested: 3000, used: 1500, capacity: 4000",
    )


def test_memory_and_pod_count() -> None:
    memory = check(amounts(memory="600"), [amounts(memory="500")])
    assert memory is not None
    assert memory.reason == "OutOfmemory"
    count = check({}, [{}, {}, {}])
    assert count == Refusal(
        reason="OutOfpods",
        message="Node didn't have enough resource: pods, requested: 1, used: 3, capacity: 3",
    )


def test_extended_resource_counts_only_where_the_node_lists_it() -> None:
    assert check(amounts(y_io__npu="8")) is None
    refusal = check(amounts(x_io__gpu="1"), [amounts(x_io__gpu="2")])
    assert refusal is not None
    assert refusal.reason == "OutOfx.io/gpu"


def test_node_selector_and_taint() -> None:
    selected = check({}, spec={"nodeSelector": {"zone": "b"}})
    assert selected is not None
    assert selected.reason == "NodeAffinity"
    tainted: Obj = {
        "metadata": {},
        "spec": {"taints": [{"key": "gone", "value": "1", "effect": "NoExecute"}]},
    }
    refusal = check({}, node=tainted)
    assert refusal is not None
    assert refusal.reason == "TaintToleration"
    for toleration in (
        {"operator": "Exists"},
        {"key": "gone", "value": "1", "effect": "NoExecute"},
        {"key": "gone", "operator": "Exists"},
    ):
        assert check({}, spec={"tolerations": [toleration]}, node=tainted) is None
    wrong = {"key": "gone", "value": "2"}
    assert check({}, spec={"tolerations": [wrong]}, node=tainted) is not None


def test_device_error_is_worded_as_kubelet_does() -> None:
    assert allocate_failed("rpc error: code = Unknown desc = no share").message == (
        "Allocate failed due to rpc error: code = Unknown desc = no share, which is unexpected"
    )
