# SPDX-License-Identifier: Apache-2.0
"""The contract for lists and watches: selectors, pages, event order, resuming."""

import pytest

from hami_sim.kube import path_of
from tests.contract.kubeapi.support import (
    Cluster,
    Events,
    a_node,
    config_map,
    pod,
    refused,
)
from tests.support.kubeclient import KubeClient

pytestmark = pytest.mark.anyio


async def _names(client: KubeClient, resource: str, namespace: str, **query: str) -> list[str]:
    listed = await client.list(resource, namespace, **query)
    return [item["metadata"]["name"] for item in listed["items"]]


class ListsContract:
    """Lists."""

    @pytest.mark.parametrize(
        ("selector", "want"),
        [
            ("team=x", ["a", "c"]),
            ("team==x", ["a", "c"]),
            ("team!=x,tier", ["b"]),
            ("team in (x, y),tier", ["a", "b", "c"]),
            ("team notin (x),tier", ["b"]),
            ("tier", ["a", "b", "c"]),
            ("!tier,team", []),
            ("tier=", []),
            ("team=x,tier=2", ["c"]),
        ],
    )
    async def test_label_selectors_select(
        self, cluster: Cluster, selector: str, want: list[str]
    ) -> None:
        for name, team, tier in (("a", "x", "1"), ("b", "y", "1"), ("c", "x", "2")):
            await cluster.client.create(
                "configmaps",
                config_map(name, labels={"team": team, "tier": tier}),
                cluster.namespace,
            )
        found = await _names(
            cluster.client, "configmaps", cluster.namespace, labelSelector=selector
        )
        assert found == want

    async def test_malformed_label_selectors_are_a_bad_request(self, cluster: Cluster) -> None:
        with refused(400, "BadRequest"):
            await cluster.client.list("pods", cluster.namespace, labelSelector="a in (")

    async def test_field_selectors_select_pods(self, cluster: Cluster) -> None:
        async with a_node(cluster.client) as node:
            for name in ("a", "b"):
                await cluster.client.create("pods", pod(name), cluster.namespace)
            await cluster.client.bind("a", node, namespace=cluster.namespace)
            for selector, want in (
                (f"spec.nodeName={node}", ["a"]),
                ("spec.nodeName=", ["b"]),
                ("spec.nodeName!=", ["a"]),
                ("status.phase=Pending", ["a", "b"]),
                ("status.phase!=Pending", []),
                ("metadata.name=b", ["b"]),
                (f"metadata.namespace={cluster.namespace},metadata.name=a", ["a"]),
                ("spec.schedulerName=nobody-schedules", ["a", "b"]),
                ("spec.restartPolicy=Never", []),
            ):
                found = await _names(
                    cluster.client, "pods", cluster.namespace, fieldSelector=selector
                )
                assert found == want, selector
            await cluster.client.delete("pods", "a", cluster.namespace, gracePeriodSeconds="0")

    async def test_unsupported_field_selectors_are_a_bad_request(self, cluster: Cluster) -> None:
        with refused(400, "BadRequest", "field label not supported: spec.hostname"):
            await cluster.client.list("pods", cluster.namespace, fieldSelector="spec.hostname=x")

    async def test_items_of_a_list_carry_no_kind(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        listed = await cluster.client.list("pods", cluster.namespace)
        assert listed["kind"] == "PodList"
        assert "kind" not in listed["items"][0]

    async def test_pages_show_one_revision(self, cluster: Cluster) -> None:
        for name in "abcde":
            await cluster.client.create("pods", pod(name), cluster.namespace)
        first = await cluster.client.list("pods", cluster.namespace, limit="2")
        names = [item["metadata"]["name"] for item in first["items"]]
        assert names == ["a", "b"]
        assert first["metadata"]["remainingItemCount"] == 3
        await cluster.client.delete("pods", "d", cluster.namespace)
        await cluster.client.create("pods", pod("ca"), cluster.namespace)
        token = first["metadata"]["continue"]
        while token:
            page = await cluster.client.list(
                "pods", cluster.namespace, limit="2", **{"continue": token}
            )
            assert page["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
            names += [item["metadata"]["name"] for item in page["items"]]
            token = page["metadata"].get("continue", "")
        assert names == ["a", "b", "c", "d", "e"]

    async def test_lists_across_namespaces_are_ordered_by_namespace(self, cluster: Cluster) -> None:
        await cluster.client.create("configmaps", config_map("zz"), cluster.namespace)
        listed = await cluster.client.list("configmaps")
        keys = [
            (item["metadata"]["namespace"], item["metadata"]["name"]) for item in listed["items"]
        ]
        assert keys == sorted(keys)
        assert (cluster.namespace, "zz") in keys

    async def test_a_future_revision_is_too_large(self, cluster: Cluster) -> None:
        listed = await cluster.client.list("pods", cluster.namespace)
        future = str(int(listed["metadata"]["resourceVersion"]) + 1_000_000)
        with refused(504, "Timeout", "Too large resource version"):
            await cluster.client.list("pods", cluster.namespace, resourceVersion=future)


class WatchContract:
    """Watches."""

    async def test_watch_reports_changes_after_the_revision_in_order(
        self, cluster: Cluster
    ) -> None:
        client, namespace = cluster.client, cluster.namespace
        await client.create("configmaps", config_map("before"), namespace)
        listed = await client.list("configmaps", namespace)
        query = {"resourceVersion": listed["metadata"]["resourceVersion"]}
        async with client.watch("configmaps", namespace, query) as watch:
            events = Events(watch)
            made = await client.create("configmaps", config_map("a"), namespace)
            await client.patch("configmaps", "a", {"data": {"k": "v"}}, namespace=namespace)
            await client.delete("configmaps", "a", namespace)
            kind, first = await events.next()
            assert (kind, first["metadata"]["uid"]) == ("ADDED", made["metadata"]["uid"])
            assert first["kind"] == "ConfigMap"
            kind, second = await events.next()
            assert (kind, second["data"]) == ("MODIFIED", {"k": "v"})
            kind, third = await events.next()
            assert kind == "DELETED"
            revisions = [int(e["metadata"]["resourceVersion"]) for e in (first, second, third)]
            assert revisions == sorted(set(revisions))

    async def test_watch_without_revision_starts_with_existing_objects(
        self, cluster: Cluster
    ) -> None:
        for name in ("a", "b"):
            await cluster.client.create("pods", pod(name), cluster.namespace)
        async with cluster.client.watch("pods", cluster.namespace) as watch:
            events = Events(watch)
            assert {await events.named(), await events.named()} == {("ADDED", "a"), ("ADDED", "b")}

    async def test_watch_sees_objects_enter_and_leave_its_label_selector(
        self, cluster: Cluster
    ) -> None:
        client, namespace = cluster.client, cluster.namespace
        listed = await client.list("configmaps", namespace)
        query = {
            "resourceVersion": listed["metadata"]["resourceVersion"],
            "labelSelector": "on=yes",
        }
        async with client.watch("configmaps", namespace, query) as watch:
            events = Events(watch)
            await client.create("configmaps", config_map("a"), namespace)
            for value in ("yes", "no", "yes"):
                await client.patch(
                    "configmaps", "a", {"metadata": {"labels": {"on": value}}}, namespace=namespace
                )
            assert await events.named() == ("ADDED", "a")
            kind, left = await events.next()
            assert kind == "DELETED"
            assert left["metadata"]["labels"] == {"on": "yes"}
            assert await events.named() == ("ADDED", "a")

    async def test_watch_by_node_name_sees_a_pod_when_it_is_bound(self, cluster: Cluster) -> None:
        client, namespace = cluster.client, cluster.namespace
        async with a_node(client) as node:
            listed = await client.list("pods", namespace)
            query = {
                "resourceVersion": listed["metadata"]["resourceVersion"],
                "fieldSelector": f"spec.nodeName={node}",
            }
            async with client.watch("pods", "", query) as watch:
                events = Events(watch)
                for name in ("a", "b"):
                    await client.create("pods", pod(name), namespace)
                await client.bind("b", node, namespace=namespace, annotations={"x": "y"})
                kind, seen = await events.next()
                assert (kind, seen["metadata"]["name"]) == ("ADDED", "b")
                assert seen["metadata"]["annotations"] == {"x": "y"}
                await client.delete("pods", "b", namespace, gracePeriodSeconds="0")
                assert (await events.next())[0] in ("MODIFIED", "DELETED")

    async def test_watch_resumes_from_a_seen_revision(self, cluster: Cluster) -> None:
        client, namespace = cluster.client, cluster.namespace
        first = await client.create("configmaps", config_map("a"), namespace)
        await client.create("configmaps", config_map("b"), namespace)
        await client.delete("configmaps", "a", namespace)
        query = {"resourceVersion": first["metadata"]["resourceVersion"]}
        async with client.watch("configmaps", namespace, query) as watch:
            events = Events(watch)
            assert await events.named() == ("ADDED", "b")
            assert await events.named() == ("DELETED", "a")

    async def test_watch_ends_after_its_timeout(self, cluster: Cluster) -> None:
        listed = await cluster.client.list("configmaps", cluster.namespace)
        query = {
            "resourceVersion": listed["metadata"]["resourceVersion"],
            "timeoutSeconds": "1",
        }
        async with cluster.client.watch("configmaps", cluster.namespace, query) as watch:
            assert await Events(watch).ended()

    async def test_streaming_list_marks_the_end_of_the_initial_events(
        self, cluster: Cluster
    ) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        query = {
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
            "allowWatchBookmarks": "true",
        }
        async with cluster.client.watch("pods", cluster.namespace, query) as watch:
            events = Events(watch)
            assert await events.named() == ("ADDED", "a")
            kind, mark = await events.any()
            assert kind == "BOOKMARK"
            assert mark["metadata"]["annotations"]["k8s.io/initial-events-end"] == "true"

    async def test_watch_tables_carry_columns_once(self, cluster: Cluster) -> None:
        for name in ("a", "b"):
            await cluster.client.create("pods", pod(name), cluster.namespace)
        accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
        async with cluster.client.watch("pods", cluster.namespace, headers=accept) as watch:
            events = Events(watch)
            first, second = (await events.next())[1], (await events.next())[1]
        assert first["columnDefinitions"]
        assert not second["columnDefinitions"]
        assert second["rows"][0]["cells"][0] in ("a", "b")

    async def test_watch_of_an_unserved_verb_is_refused(self, cluster: Cluster) -> None:
        path = path_of("bindings", cluster.namespace)
        reply = await cluster.client.raw("GET", path, query={"watch": "1"})
        assert reply.code == 405
