# SPDX-License-Identifier: Apache-2.0
"""Variables, command lines and downward-API fields of a container."""

from decimal import Decimal

import pytest

from hami_sim.kubelet.environ import (
    FieldError,
    NodeFacts,
    Sources,
    command_line,
    environment,
    expand,
    field_value,
    format_map,
    referenced,
    resource_value,
)
from hami_sim.kubelet.objects import Obj

FACTS = NodeFacts(
    host_ip="192.0.2.1", allocatable={"cpu": Decimal(4), "memory": Decimal(8 * 2**30)}
)


def pod(**spec: object) -> Obj:
    return {
        "metadata": {
            "name": "web-0",
            "namespace": "team",
            "uid": "u1",
            "labels": {"app": "web"},
            "annotations": {"main.limits.hami.io/v1": "hami-limits/1\n", "b": 'say "hi"', "a": "1"},
        },
        "spec": {"nodeName": "node-a", **spec},
    }


def variables(
    container: Obj, *, envs: dict[str, str] | None = None, **sources: object
) -> dict[str, str]:
    return environment(
        pod(),
        container,
        plugin_envs=envs or {},
        sources=Sources(**sources),  # type: ignore[arg-type]  # table cases
        pod_ip="10.0.0.7",
        facts=FACTS,
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("$(A)", "one"),
        ("x$(A)y$(B)", "xoneytwo"),
        ("$$(A)", "$(A)"),
        ("$(MISSING)", "$(MISSING)"),
        ("$(A", "$(A"),
        ("$A", "$A"),
        ("cost $", "cost $"),
        ("$$$$", "$$"),
        ("", ""),
    ],
)
def test_expand_replaces_known_names_only(text: str, want: str) -> None:
    assert expand(text, {"A": "one", "B": "two"}) == want


def test_pod_variable_wins_over_plugin_variable() -> None:
    found = variables(
        {"env": [{"name": "VISIBLE", "value": "all"}]}, envs={"VISIBLE": "0", "LIMIT": "1g"}
    )
    assert (found["VISIBLE"], found["LIMIT"]) == ("all", "1g")


def test_variable_refers_to_earlier_variable_of_the_pod_but_not_of_the_plugin() -> None:
    found = variables(
        {
            "env": [
                {"name": "LATE", "value": "$(FIRST) $(PLUGIN)"},
                {"name": "FIRST", "value": "1"},
                {"name": "SECOND", "value": "$(FIRST)2"},
            ]
        },
        envs={"PLUGIN": "x"},
    )
    assert found["LATE"] == "$(FIRST) $(PLUGIN)"
    assert found["SECOND"] == "12"


def test_variables_from_fields_and_resources() -> None:
    container = {
        "resources": {"limits": {"memory": "100Mi"}},
        "env": [
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
            {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {
                "name": "MIB",
                "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
            },
        ],
    }
    found = variables(container)
    assert {key: found[key] for key in ("NODE", "IP", "HOST", "APP", "CPU", "MIB")} == {
        "NODE": "node-a",
        "IP": "10.0.0.7",
        "HOST": "192.0.2.1",
        "APP": "web",
        "CPU": "4",  # no limit: the node's
        "MIB": "100",
    }


def test_variables_from_config_map_and_secret_with_prefix_and_override() -> None:
    found = variables(
        {
            "envFrom": [
                {"prefix": "P_", "configMapRef": {"name": "c"}},
                {"secretRef": {"name": "s"}},
            ],
            "env": [
                {"name": "P_A", "value": "own"},
                {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "B"}}},
            ],
        },
        config_maps={"c": {"A": "1", "B": "2"}},
        secrets={"s": {"PASS": "x"}},
    )
    assert (found["P_A"], found["P_B"], found["PASS"], found["K"]) == ("own", "2", "x", "2")


def test_missing_config_map_is_an_error_unless_optional() -> None:
    wanted = {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "B"}}}
    with pytest.raises(FieldError, match='configmap "c" not found'):
        variables({"env": [wanted]}, config_maps={"c": None})
    wanted["valueFrom"]["configMapKeyRef"]["optional"] = True  # type: ignore[index]  # plain JSON
    assert "K" not in variables({"env": [wanted]}, config_maps={"c": None})


def test_referenced_names_every_object_a_container_needs() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "a"}}, {"secretRef": {"name": "b"}}],
        "env": [
            {"name": "X", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            {"name": "Y", "valueFrom": {"secretKeyRef": {"name": "d", "key": "k"}}},
        ],
    }
    assert referenced(container) == ({"a", "c"}, {"b", "d"})


@pytest.mark.parametrize(
    ("container", "entrypoint", "want"),
    [
        ({"command": ["a"], "args": ["$(X)"]}, ("e",), ["a", "1"]),
        ({"args": ["b"]}, ("e", "f"), ["e", "f", "b"]),
        ({"args": ["b"]}, (), ["b"]),
        ({}, ("e",), ["e"]),
        ({}, (), ["fallback"]),
    ],
)
def test_command_line_fills_gaps_from_the_image(
    container: Obj, entrypoint: tuple[str, ...], want: list[str]
) -> None:
    found = command_line(container, {"X": "1"}, entrypoint=entrypoint, fallback=["fallback"])
    assert found == want


def test_field_value_reads_one_annotation_byte_for_byte() -> None:
    assert field_value(pod(), "metadata.annotations['main.limits.hami.io/v1']") == "hami-limits/1\n"
    assert field_value(pod(), "metadata.annotations['absent']") == ""


def test_field_value_of_all_annotations_is_sorted_and_quoted() -> None:
    assert format_map({"b": 'say "hi"', "a": "1"}) == 'a="1"\nb="say \\"hi\\""'


def test_field_value_refuses_other_fields() -> None:
    with pytest.raises(FieldError, match=r"unsupported fieldPath: spec\.nodeName"):
        field_value(pod(), "spec.nodeName")


def test_resource_value_rounds_up() -> None:
    container = {"resources": {"limits": {"cpu": "1100m"}, "requests": {"memory": "1"}}}
    assert resource_value(pod(), container, {"resource": "limits.cpu"}, facts=FACTS) == "2"
    selector = {"resource": "requests.memory", "divisor": "1Mi"}
    assert resource_value(pod(), container, selector, facts=FACTS) == "1"
