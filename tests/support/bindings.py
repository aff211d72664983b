# SPDX-License-Identifier: Apache-2.0
"""Bindings of other schedulers, and the API server's side of a review of one."""

import base64
import copy
from typing import Any

import msgspec

Obj = dict[str, Any]


def binding(name: str, node: str, *, namespace: str = "default", **metadata: Any) -> Obj:
    """A Binding as another scheduler posts it."""
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }


def review(document: Obj, **request: Any) -> Obj:
    """The API server's review of a Binding."""
    metadata = document["metadata"]
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "review-1",
            "operation": "CREATE",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "subResource": "binding",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "userInfo": {"username": "system:serviceaccount:volcano-system:volcano-scheduler"},
            "object": document,
            "dryRun": False,
            **request,
        },
    }


def changed(document: Obj, response: Obj) -> Obj:
    """The Binding after the patch of an answer; every operation of ours sets a field."""
    after = copy.deepcopy(document)
    if "patch" not in response:
        return after
    for operation in msgspec.json.decode(base64.b64decode(response["patch"])):
        assert operation["op"] == "add"
        _, parent, key = operation["path"].split("/")
        after[parent][key] = operation["value"]
    return after
