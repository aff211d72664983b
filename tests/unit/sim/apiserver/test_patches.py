# SPDX-License-Identifier: Apache-2.0
"""Patch arithmetic."""

from typing import Any

import pytest

from hami_sim.apiserver.errors import ApiError
from hami_sim.apiserver.patches import (
    apply_merge,
    drop_fields,
    field_set,
    json_patch,
    merge_patch,
    strategic_merge,
    subtract,
)


@pytest.mark.parametrize(
    ("document", "patch", "want"),
    [
        ({"a": 1}, [{"op": "add", "path": "/b", "value": 2}], {"a": 1, "b": 2}),
        ({"a": [1, 3]}, [{"op": "add", "path": "/a/1", "value": 2}], {"a": [1, 2, 3]}),
        ({"a": [1]}, [{"op": "add", "path": "/a/-", "value": 2}], {"a": [1, 2]}),
        ({"a": {"b": 1}}, [{"op": "remove", "path": "/a/b"}], {"a": {}}),
        ({"a": [1, 2]}, [{"op": "remove", "path": "/a/0"}], {"a": [2]}),
        ({"a": [1, 2]}, [{"op": "replace", "path": "/a/1", "value": 3}], {"a": [1, 3]}),
        ({"a": 1}, [{"op": "move", "from": "/a", "path": "/b"}], {"b": 1}),
        (
            {"a": {"x": 1}},
            [{"op": "copy", "from": "/a", "path": "/b"}],
            {"a": {"x": 1}, "b": {"x": 1}},
        ),
        ({"a/b": {"~": 1}}, [{"op": "replace", "path": "/a~1b/~0", "value": 2}], {"a/b": {"~": 2}}),
        ({"a": 1}, [{"op": "add", "path": "", "value": {"z": 0}}], {"z": 0}),
    ],
)
def test_json_patch_operations(document: Any, patch: Any, want: Any) -> None:
    assert json_patch(document, patch) == want


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/absent"},
        {"op": "replace", "path": "/absent", "value": 1},
        {"op": "add", "path": "/absent/deep", "value": 1},
        {"op": "add", "path": "/list/9", "value": 1},
        {"op": "test", "path": "/a", "value": 2},
        {"op": "test", "path": "/a", "value": True},
        {"op": "grow", "path": "/a"},
        {"op": "add", "path": "a", "value": 1},
    ],
)
def test_json_patch_that_does_not_apply_is_refused_and_changes_nothing(operation: Any) -> None:
    document = {"a": 1, "list": []}
    first = {"op": "add", "path": "/new", "value": 1}
    with pytest.raises(ApiError):
        json_patch(document, [first, operation])
    assert document == {"a": 1, "list": []}


def test_merge_patch_replaces_lists_and_removes_nulls() -> None:
    document = {"a": {"b": 1, "c": 2}, "l": [1, 2]}
    patch = {"a": {"b": None, "d": {"e": None, "f": 1}}, "l": [3]}
    assert merge_patch(document, patch) == {"a": {"c": 2, "d": {"f": 1}}, "l": [3]}


def _pod(**spec: Any) -> Any:
    return {"spec": spec}


def test_strategic_merge_adds_changes_and_deletes_list_elements_by_key() -> None:
    document = _pod(
        containers=[
            {"name": "a", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]},
            {"name": "b"},
        ]
    )
    patch = _pod(
        containers=[
            {"name": "a", "env": [{"name": "X", "$patch": "delete"}, {"name": "Z", "value": "3"}]},
            {"name": "b", "$patch": "delete"},
            {"name": "c", "image": "i"},
        ]
    )
    assert strategic_merge(document, patch, kind="Pod") == _pod(
        containers=[
            {"name": "a", "env": [{"name": "Y", "value": "2"}, {"name": "Z", "value": "3"}]},
            {"name": "c", "image": "i"},
        ]
    )


def test_strategic_merge_keys_mounts_by_path() -> None:
    document = {
        "volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]
    }
    patch = {"volumeMounts": [{"name": "w", "mountPath": "/b"}]}
    merged = strategic_merge(document, patch, kind="Pod")
    assert merged["volumeMounts"] == [
        {"name": "v", "mountPath": "/a"},
        {"name": "w", "mountPath": "/b"},
    ]


def test_strategic_merge_replaces_atomic_lists_and_merges_sets() -> None:
    document = {"tolerations": [{"key": "a"}], "finalizers": ["x"]}
    patch = {"tolerations": [{"key": "b"}], "finalizers": ["y", "x"]}
    assert strategic_merge(document, patch, kind="Pod") == {
        "tolerations": [{"key": "b"}],
        "finalizers": ["x", "y"],
    }


def test_strategic_merge_directives() -> None:
    document = {"m": {"a": 1, "b": 2}, "finalizers": ["x", "y"], "gone": {"a": 1}}
    patch = {
        "m": {"$patch": "replace", "c": 3},
        "$deleteFromPrimitiveList/finalizers": ["x"],
        "gone": {"$patch": "delete"},
    }
    assert strategic_merge(document, patch, kind="Pod") == {"m": {"c": 3}, "finalizers": ["y"]}


def test_strategic_merge_orders_elements_as_the_patch_asks() -> None:
    document = {"containers": [{"name": "a"}, {"name": "b"}]}
    patch = {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}
    merged = strategic_merge(document, patch, kind="Pod")
    assert [item["name"] for item in merged["containers"]] == ["b", "a"]


def test_strategic_merge_retains_only_the_named_volume_source() -> None:
    document = {"volumes": [{"name": "v", "emptyDir": {}}]}
    patch = {
        "volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}}]
    }
    merged = strategic_merge(document, patch, kind="Pod")
    assert merged["volumes"] == [{"name": "v", "hostPath": {"path": "/x"}}]


def test_strategic_merge_without_the_key_is_refused() -> None:
    with pytest.raises(ApiError, match="does not contain declared merge key: name"):
        strategic_merge({"containers": []}, {"containers": [{"image": "i"}]}, kind="Pod")


def test_service_ports_merge_by_port() -> None:
    document = {"ports": [{"port": 80, "name": "http"}]}
    merged = strategic_merge(
        document, {"ports": [{"port": 80, "targetPort": 8080}]}, kind="Service"
    )
    assert merged == {"ports": [{"port": 80, "name": "http", "targetPort": 8080}]}


def test_apply_removes_what_its_manager_no_longer_sets() -> None:
    first = {"metadata": {"name": "a", "labels": {"x": "1", "y": "2"}}, "data": {"k": "v"}}
    second = {"metadata": {"name": "a", "labels": {"x": "1"}}}
    live = apply_merge({"data": {"other": "o"}}, first, kind="ConfigMap")
    gone = subtract(field_set(first, "ConfigMap"), field_set(second, "ConfigMap"))
    assert drop_fields(live, gone, "ConfigMap") == {
        "metadata": {"name": "a", "labels": {"x": "1"}},
        "data": {"other": "o"},
    }


def test_apply_owns_list_elements_by_key() -> None:
    first = {"spec": {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]}}
    second = {"spec": {"containers": [{"name": "a", "image": "2"}]}}
    live = apply_merge(first, second, kind="Pod")
    gone = subtract(field_set(first, "Pod"), field_set(second, "Pod"))
    assert drop_fields(live, gone, "Pod") == second
