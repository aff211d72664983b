# SPDX-License-Identifier: Apache-2.0
"""Reading the few fields of a Pod that the services need, from any pod document."""

import msgspec
import pytest

from hami_common.pods.podview import PodListView, PodView


def pod(text: str) -> PodView:
    return msgspec.json.decode(text, type=PodView)


def test_containers_come_in_the_order_of_admission() -> None:
    view = pod(
        """{"spec":{
        "containers":[{"name":"app-1"},{"name":"app-2"}],
        "initContainers":[{"name":"i-1"},{"name":"s-1","restartPolicy":"Always"},{"name":"i-2"}],
        "ephemeralContainers":[{"name":"debug","targetContainerName":"app-1"}]}}"""
    )
    assert [(kind, c.name) for kind, c in view.containers_in_order()] == [
        ("init", "i-1"),
        ("sidecar", "s-1"),
        ("init", "i-2"),
        ("app", "app-1"),
        ("app", "app-2"),
    ]


def test_quantities_are_text_whether_written_as_text_or_number() -> None:
    view = pod(
        '{"spec":{"containers":[{"name":"c","resources":'
        '{"limits":{"a":"1","b":2,"c":0.5},"requests":{"cpu":"100m"}}}]}}'
    )
    (container,) = view.spec.containers
    assert container.limits() == {"a": "1", "b": "2", "c": "0.5"}
    assert container.requests() == {"cpu": "100m"}


def test_absent_and_null_parts_are_empty() -> None:
    for text in ("{}", '{"metadata":{"annotations":null,"labels":null}}'):
        view = pod(text)
        assert (view.annotations(), view.labels(), view.containers_in_order()) == ({}, {}, [])
    (container,) = pod('{"spec":{"containers":[{"name":"c","resources":null}]}}').spec.containers
    assert (container.limits(), container.requests()) == ({}, {})


@pytest.mark.parametrize(
    ("phase", "finished"),
    [
        ("Pending", False),
        ("Running", False),
        ("Unknown", False),
        ("", False),
        ("Succeeded", True),
        ("Failed", True),
    ],
)
def test_a_pod_is_finished_only_in_a_final_phase(phase: str, *, finished: bool) -> None:
    assert pod(f'{{"status":{{"phase":"{phase}"}}}}').is_finished() is finished


def test_a_pod_being_deleted_is_not_finished_yet() -> None:
    view = pod(
        '{"metadata":{"deletionTimestamp":"2026-01-01T00:00:00Z"},"status":{"phase":"Running"}}'
    )
    assert not view.is_finished()


def test_a_full_document_is_read_and_the_rest_skipped() -> None:
    page = msgspec.json.decode(
        """{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"77"},"items":[{
        "metadata":{"name":"web","namespace":"d","uid":"u","resourceVersion":"5",
          "managedFields":[{"manager":"kubectl","fieldsV1":{"f:metadata":{}}}],
          "ownerReferences":[{"apiVersion":"apps/v1","kind":"ReplicaSet","name":"w","uid":"r"}]},
        "spec":{"nodeName":"n1","schedulerName":"hami-scheduler","hostPID":true,
          "tolerations":[{"operator":"Exists"}],
          "volumes":[{"name":"v","emptyDir":{}}],
          "containers":[{"name":"c","image":"i","env":[{"name":"A","value":"1"},
            {"name":"B","valueFrom":{"fieldRef":{"fieldPath":"x"}}}],
            "volumeMounts":[{"name":"v","mountPath":"/x","readOnly":true}],
            "securityContext":{"privileged":true,"capabilities":{"add":["ALL"]}}}]},
        "status":{"phase":"Running","podIP":"10.0.0.1",
          "conditions":[{"type":"Ready","status":"True"}],
          "containerStatuses":[{"name":"c","ready":true,"restartCount":2,
            "state":{"running":{"startedAt":"2026-01-01T00:00:00Z"}}}]}}]}""",
        type=PodListView,
    )
    (view,) = page.items
    assert page.metadata.resource_version == "77"
    assert (view.metadata.name, view.spec.node_name, view.status.phase) == ("web", "n1", "Running")
    (container,) = view.spec.containers
    assert [(e.name, e.value) for e in container.env or []] == [("A", "1"), ("B", None)]
    assert container.security_context is not None
    assert container.security_context.privileged
    (status,) = view.status.container_statuses or []
    assert status.state is not None
    assert status.state.running
    assert not status.state.waiting
    assert view.spec.host_pid, "hostPID is spelled with capitals in the API"
