# SPDX-License-Identifier: Apache-2.0
"""The contract for objects: create, read, update, patch, delete, and refusals."""

import pytest

from hami_sim.kube import APPLY, JSON_PATCH, STRATEGIC, Access, path_of
from tests.contract.kubeapi.support import (
    Cluster,
    Obj,
    a_node,
    config_map,
    container,
    exists,
    limited,
    pod,
    refused,
    unique,
    until,
)
from tests.support.kubeclient import KubeClient, StatusError

pytestmark = pytest.mark.anyio


class ObjectsContract:
    """Verbs on ordinary objects."""

    async def test_create_returns_the_object_with_system_fields(self, cluster: Cluster) -> None:
        made = await cluster.client.create(
            "configmaps", config_map("a", {"k": "v"}), cluster.namespace
        )
        metadata = made["metadata"]
        assert made["kind"] == "ConfigMap"
        assert made["apiVersion"] == "v1"
        assert metadata["uid"]
        assert metadata["creationTimestamp"].endswith("Z")
        assert int(metadata["resourceVersion"]) > 0
        assert metadata["namespace"] == cluster.namespace

    async def test_create_refuses_a_name_that_is_taken(self, cluster: Cluster) -> None:
        await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        with refused(409, "AlreadyExists", 'configmaps "a" already exists') as refusal:
            await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        assert refusal.error.status["details"]["kind"] == "configmaps"
        assert refusal.error.status["details"]["name"] == "a"

    async def test_generate_name_makes_distinct_names(self, cluster: Cluster) -> None:
        names = set()
        for _ in range(5):
            made = await cluster.client.create("pods", pod(generateName="job-"), cluster.namespace)
            names.add(made["metadata"]["name"])
        assert len(names) == 5
        assert all(name.startswith("job-") and len(name) == 9 for name in names)

    async def test_create_refuses_a_resource_version(self, cluster: Cluster) -> None:
        with refused(500, "", "resourceVersion should not be set"):
            await cluster.client.create(
                "configmaps", config_map("a", resourceVersion="5"), cluster.namespace
            )

    async def test_create_in_an_absent_namespace_is_not_found(self, cluster: Cluster) -> None:
        with refused(404, "NotFound", 'namespaces "absent-ns" not found'):
            await cluster.client.create("pods", pod("a"), "absent-ns")

    async def test_dry_run_returns_the_object_and_stores_nothing(self, cluster: Cluster) -> None:
        made = await cluster.client.create("pods", pod("a"), cluster.namespace, dryRun="All")
        assert made["metadata"]["uid"]
        assert not await exists(cluster.client, "pods", "a", cluster.namespace)

    async def test_get_of_an_absent_object_is_not_found(self, cluster: Cluster) -> None:
        with refused(404, "NotFound", 'pods "nope" not found'):
            await cluster.client.get("pods", "nope", cluster.namespace)

    async def test_unknown_resource_is_not_found(self, cluster: Cluster) -> None:
        reply = await cluster.client.raw("GET", "/api/v1/unicorns")
        assert reply.code == 404

    async def test_names_must_be_dns_names(self, cluster: Cluster) -> None:
        with refused(422, "Invalid", "metadata.name") as refusal:
            await cluster.client.create("configmaps", config_map("Not_DNS"), cluster.namespace)
        assert refusal.error.causes[0]["field"] == "metadata.name"
        assert refusal.error.causes[0]["reason"] == "FieldValueInvalid"

    async def test_label_keys_and_values_have_a_syntax(self, cluster: Cluster) -> None:
        for labels in ({"bad key": "x"}, {"ok": "no spaces"}, {"a/b/c": "x"}, {"ok": "x" * 64}):
            with refused(422, "Invalid", "metadata.labels"):
                await cluster.client.create(
                    "configmaps", config_map("a", labels=labels), cluster.namespace
                )

    async def test_annotation_name_part_over_63_characters_is_refused(
        self, cluster: Cluster
    ) -> None:
        with refused(422, "Invalid", "metadata.annotations"):
            await cluster.client.create(
                "configmaps",
                config_map("a", annotations={f"example.com/{'x' * 64}": ""}),
                cluster.namespace,
            )

    async def test_annotations_over_256_kib_are_refused(self, cluster: Cluster) -> None:
        with refused(422, "Invalid", "may not be more than 262144 bytes"):
            await cluster.client.create(
                "configmaps",
                config_map("a", annotations={"big": "x" * 262_144}),
                cluster.namespace,
            )

    async def test_annotation_values_must_be_text(self, cluster: Cluster) -> None:
        with refused(400, "BadRequest", "cannot unmarshal number into Go struct field"):
            await cluster.client.create("pods", pod("a", annotations={"n": 1}), cluster.namespace)

    async def test_replace_with_a_stale_resource_version_conflicts(self, cluster: Cluster) -> None:
        old = await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        await cluster.client.replace("configmaps", {**old, "data": {"k": "1"}})
        with refused(409, "Conflict", "the object has been modified"):
            await cluster.client.replace("configmaps", {**old, "data": {"k": "2"}})
        found = await cluster.client.get("configmaps", "a", cluster.namespace)
        assert found["data"] == {"k": "1"}

    async def test_replace_that_changes_nothing_keeps_the_resource_version(
        self, cluster: Cluster
    ) -> None:
        made = await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        again = await cluster.client.replace("configmaps", made)
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]

    async def test_replace_under_another_name_is_a_bad_request(self, cluster: Cluster) -> None:
        made = await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        made["metadata"]["name"] = "b"
        path = path_of("configmaps", cluster.namespace, "a")
        with refused(400, "BadRequest", "does not match the name on the URL"):
            await cluster.client.call("PUT", path, body=made)

    async def test_merge_patch_sets_and_removes(self, cluster: Cluster) -> None:
        await cluster.client.create(
            "configmaps", config_map("a", {"keep": "1", "drop": "2"}), cluster.namespace
        )
        patched = await cluster.client.patch(
            "configmaps",
            "a",
            {"data": {"drop": None, "new": "3"}},
            namespace=cluster.namespace,
        )
        assert patched["data"] == {"keep": "1", "new": "3"}

    async def test_merge_patch_with_a_stale_resource_version_conflicts(
        self, cluster: Cluster
    ) -> None:
        made = await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        moved = {"metadata": {"annotations": {"x": "1"}}}
        await cluster.client.patch("configmaps", "a", moved, namespace=cluster.namespace)
        version = made["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version, "annotations": {"x": "2"}}}
        with refused(409, "Conflict"):
            await cluster.client.patch("configmaps", "a", patch, namespace=cluster.namespace)

    @pytest.mark.parametrize(
        ("resource", "made"), [("configmaps", config_map("a")), ("pods", pod("a"))]
    )
    async def test_patch_with_a_foreign_uid_is_invalid(
        self, cluster: Cluster, resource: str, made: Obj
    ) -> None:
        await cluster.client.create(resource, made, cluster.namespace)
        with refused(422, "Invalid", "metadata.uid: Invalid value"):
            await cluster.client.patch(
                resource,
                "a",
                {"metadata": {"uid": "someone-else", "annotations": {"x": "1"}}},
                namespace=cluster.namespace,
            )

    async def test_status_patch_with_a_foreign_uid_is_invalid(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        with refused(422, "Invalid", "metadata.uid: Invalid value"):
            await cluster.client.patch(
                "pods",
                "a",
                {"metadata": {"uid": "someone-else"}, "status": {"phase": "Running"}},
                namespace=cluster.namespace,
                kind=STRATEGIC,
                subresource="status",
            )

    async def test_replace_with_a_foreign_uid_conflicts(self, cluster: Cluster) -> None:
        made = await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        made["metadata"]["uid"] = "someone-else"
        with refused(409, "Conflict", "UID in precondition: someone-else"):
            await cluster.client.replace("configmaps", made)

    async def test_json_patch_applies_all_operations_or_none(self, cluster: Cluster) -> None:
        made = config_map("a", {"k": "1"}, annotations={"x": "1"})
        await cluster.client.create("configmaps", made, cluster.namespace)
        await cluster.client.patch(
            "configmaps",
            "a",
            [
                {"op": "test", "path": "/data/k", "value": "1"},
                {"op": "add", "path": "/metadata/annotations/a~1b", "value": "2"},
                {"op": "replace", "path": "/data/k", "value": "3"},
            ],
            namespace=cluster.namespace,
            kind=JSON_PATCH,
        )
        with refused(422, "Invalid"):
            await cluster.client.patch(
                "configmaps",
                "a",
                [
                    {"op": "remove", "path": "/data/k"},
                    {"op": "test", "path": "/metadata/annotations/a~1b", "value": "other"},
                ],
                namespace=cluster.namespace,
                kind=JSON_PATCH,
            )
        found = await cluster.client.get("configmaps", "a", cluster.namespace)
        assert found["data"] == {"k": "3"}
        assert found["metadata"]["annotations"]["a/b"] == "2"

    async def test_unknown_patch_type_is_unsupported(self, cluster: Cluster) -> None:
        await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        with refused(415, "UnsupportedMediaType"):
            await cluster.client.patch(
                "configmaps", "a", {}, namespace=cluster.namespace, kind="application/json"
            )

    async def test_strategic_merge_patch_merges_containers_by_name(self, cluster: Cluster) -> None:
        made = pod("a", containers=[container("one"), container("two")])
        await cluster.client.create("pods", made, cluster.namespace)
        patched = await cluster.client.patch(
            "pods",
            "a",
            {"spec": {"containers": [{"name": "two", "image": "registry.example/app:2"}]}},
            namespace=cluster.namespace,
            kind=STRATEGIC,
        )
        images = {c["name"]: c["image"] for c in patched["spec"]["containers"]}
        assert images == {"one": "registry.example/app:1", "two": "registry.example/app:2"}

    async def test_strategic_merge_patch_merges_conditions_by_type(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        for kind, value in (("Ready", "False"), ("PodScheduled", "True"), ("Ready", "True")):
            await cluster.client.patch(
                "pods",
                "a",
                {"status": {"conditions": [{"type": kind, "status": value}]}},
                namespace=cluster.namespace,
                kind=STRATEGIC,
                subresource="status",
            )
        found = await cluster.client.get("pods", "a", cluster.namespace)
        conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
        assert conditions == {"Ready": "True", "PodScheduled": "True"}

    async def test_apply_creates_then_merges_then_removes_what_it_no_longer_sets(
        self, cluster: Cluster
    ) -> None:
        path = path_of("configmaps", cluster.namespace, "a")
        query = {"fieldManager": "contract"}
        headers = {"Content-Type": APPLY}
        first = config_map("a", {"one": "1", "two": "2"})
        await cluster.client.call("PATCH", path, body=first, query=query, headers=headers)
        await cluster.client.patch(
            "configmaps", "a", {"data": {"other": "x"}}, namespace=cluster.namespace
        )
        second = config_map("a", {"one": "1b"})
        applied = await cluster.client.call(
            "PATCH", path, body=second, query=query, headers=headers
        )
        assert applied["data"] == {"one": "1b", "other": "x"}

    async def test_apply_by_another_manager_conflicts_unless_forced(self, cluster: Cluster) -> None:
        path = path_of("configmaps", cluster.namespace, "a")
        headers = {"Content-Type": APPLY}
        await cluster.client.call(
            "PATCH",
            path,
            body=config_map("a", {"k": "1"}),
            query={"fieldManager": "one"},
            headers=headers,
        )
        other = config_map("a", {"k": "2"})
        with refused(409, "Conflict", 'conflict with "one"'):
            await cluster.client.call(
                "PATCH", path, body=other, query={"fieldManager": "two"}, headers=headers
            )
        forced = {"fieldManager": "two", "force": "true"}
        applied = await cluster.client.call(
            "PATCH", path, body=other, query=forced, headers=headers
        )
        assert applied["data"] == {"k": "2"}

    async def test_delete_answers_with_a_status_that_names_the_object(
        self, cluster: Cluster
    ) -> None:
        made = await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        gone = await cluster.client.delete("configmaps", "a", cluster.namespace)
        assert gone["status"] == "Success"
        assert gone["details"]["uid"] == made["metadata"]["uid"]
        assert not await exists(cluster.client, "configmaps", "a", cluster.namespace)

    async def test_delete_preconditions_hold_or_conflict(self, cluster: Cluster) -> None:
        made = await cluster.client.create("configmaps", config_map("a"), cluster.namespace)
        wrong = {"preconditions": {"uid": "someone-else"}}
        with refused(409, "Conflict", "the UID in the precondition (someone-else) does not match"):
            await cluster.client.delete("configmaps", "a", cluster.namespace, body=wrong)
        stale = {"preconditions": {"resourceVersion": "1"}}
        with refused(409, "Conflict", "the ResourceVersion in the precondition (1) does not match"):
            await cluster.client.delete("configmaps", "a", cluster.namespace, body=stale)
        right = {"preconditions": {"uid": made["metadata"]["uid"]}}
        await cluster.client.delete("configmaps", "a", cluster.namespace, body=right)
        assert not await exists(cluster.client, "configmaps", "a", cluster.namespace)

    async def test_finalizer_keeps_a_deleted_object_until_it_is_removed(
        self, cluster: Cluster
    ) -> None:
        made = config_map("a", finalizers=["example.com/wait"])
        await cluster.client.create("configmaps", made, cluster.namespace)
        await cluster.client.delete("configmaps", "a", cluster.namespace)
        found = await cluster.client.get("configmaps", "a", cluster.namespace)
        assert found["metadata"]["deletionTimestamp"]
        await cluster.client.patch(
            "configmaps", "a", {"metadata": {"finalizers": None}}, namespace=cluster.namespace
        )
        assert not await exists(cluster.client, "configmaps", "a", cluster.namespace)

    async def test_deleting_an_owner_collects_its_dependents(self, cluster: Cluster) -> None:
        owner = await cluster.client.create("configmaps", config_map("owner"), cluster.namespace)
        reference = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "owner",
            "uid": owner["metadata"]["uid"],
        }
        await cluster.client.create(
            "configmaps", config_map("owned", ownerReferences=[reference]), cluster.namespace
        )
        await cluster.client.delete("configmaps", "owner", cluster.namespace)

        async def collected() -> bool:
            return not await exists(cluster.client, "configmaps", "owned", cluster.namespace)

        await until(collected)

    async def test_delete_collection_deletes_the_selected_objects(self, cluster: Cluster) -> None:
        for name, team in (("a", "x"), ("b", "y"), ("c", "x")):
            await cluster.client.create(
                "configmaps", config_map(name, labels={"team": team}), cluster.namespace
            )
        path = path_of("configmaps", cluster.namespace)
        await cluster.client.call("DELETE", path, query={"labelSelector": "team=x"})
        left = await cluster.client.list("configmaps", cluster.namespace, labelSelector="team")
        assert [item["metadata"]["name"] for item in left["items"]] == ["b"]

    async def test_deleting_a_namespace_removes_its_content(self, cluster: Cluster) -> None:
        name = unique("doomed")
        await cluster.client.create("namespaces", {"metadata": {"name": name}})
        await cluster.client.create("configmaps", config_map("a"), name)
        gone = await cluster.client.delete("namespaces", name)
        assert gone["status"]["phase"] == "Terminating"

        async def removed() -> bool:
            return not await exists(cluster.client, "namespaces", name)

        await until(removed)
        assert (await cluster.client.list("configmaps", name))["items"] == []

    async def test_events_of_both_groups_are_the_same_objects(self, cluster: Cluster) -> None:
        about = {"kind": "Pod", "namespace": cluster.namespace, "name": "p"}
        await cluster.client.create(
            "events.events.k8s.io",
            {
                "metadata": {"name": "e1"},
                "eventTime": "2026-01-02T03:04:05.000000Z",
                "reportingController": "contract",
                "reportingInstance": "contract-0",
                "action": "Test",
                "reason": "Testing",
                "regarding": about,
                "note": "hello",
                "type": "Normal",
            },
            cluster.namespace,
        )
        selector = "involvedObject.name=p,reason=Testing"
        listed = await cluster.client.list("events", cluster.namespace, fieldSelector=selector)
        assert [item["message"] for item in listed["items"]] == ["hello"]
        assert listed["items"][0]["reportingComponent"] == "contract"

    async def test_lease_update_needs_the_resource_version(self, cluster: Cluster) -> None:
        resource = "leases.coordination.k8s.io"
        lease = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}}
        made = await cluster.client.create(resource, lease, cluster.namespace)
        blind = {"metadata": {"name": "l", "namespace": cluster.namespace}, "spec": {}}
        with refused(422, "Invalid", "metadata.resourceVersion"):
            await cluster.client.replace(resource, blind)
        made["spec"]["holderIdentity"] = "b"
        taken = await cluster.client.replace(resource, made)
        assert taken["spec"]["holderIdentity"] == "b"

    async def test_node_status_and_spec_are_written_apart(self, cluster: Cluster) -> None:
        async with a_node(cluster.client) as name:
            await cluster.client.patch(
                "nodes",
                name,
                {"spec": {"unschedulable": True}, "status": {"capacity": {"cpu": "99"}}},
            )
            node = await cluster.client.get("nodes", name)
            assert node["spec"]["unschedulable"] is True
            assert node["status"]["capacity"]["cpu"] == "8"
            patched = await cluster.client.patch(
                "nodes",
                name,
                {
                    "spec": {"unschedulable": None},
                    "status": {"capacity": {"example.com/thing": "1000"}},
                },
                subresource="status",
            )
            assert patched["spec"]["unschedulable"] is True
            assert patched["status"]["capacity"]["example.com/thing"] == "1k"

    async def test_requests_without_a_known_token_are_unauthorized(self, cluster: Cluster) -> None:
        access = Access(url=cluster.access.url, ca_pem=cluster.access.ca_pem, token="not-a-token")
        async with KubeClient(access) as client:
            reply = await client.raw("GET", "/api/v1/pods")
        assert reply.code == 401
        assert reply.json["reason"] == "Unauthorized"

    async def test_protobuf_only_clients_receive_json(self, cluster: Cluster) -> None:
        accepts = {"Accept": "application/vnd.kubernetes.protobuf;q=1,application/json"}
        reply = await cluster.client.raw("GET", "/version", headers=accepts)
        assert reply.json["major"] == "1"

    async def test_table_answers_have_the_columns_of_pods(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        accepts = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
        table = await cluster.client.call(
            "GET", path_of("pods", cluster.namespace), headers=accepts
        )
        assert table["kind"] == "Table"
        names = [column["name"] for column in table["columnDefinitions"]]
        assert names[:5] == ["Name", "Ready", "Status", "Restarts", "Age"]
        assert table["rows"][0]["cells"][:3] == ["a", "0/1", "Pending"]

    async def test_metadata_only_answers_are_served(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        kind = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
        listed = await cluster.client.call(
            "GET", path_of("pods", cluster.namespace), headers={"Accept": kind}
        )
        assert listed["kind"] == "PartialObjectMetadataList"
        assert "spec" not in listed["items"][0]

    async def test_discovery_lists_pods_with_their_short_name(self, cluster: Cluster) -> None:
        listed = await cluster.client.call("GET", "/api/v1")
        by_name = {item["name"]: item for item in listed["resources"]}
        assert by_name["pods"]["shortNames"] == ["po"]
        assert by_name["pods/binding"]["kind"] == "Binding"
        assert by_name["nodes"]["namespaced"] is False


class PodsContract:
    """Changes that the server makes to pods by itself."""

    async def test_defaults_are_filled_in(self, cluster: Cluster) -> None:
        made = await cluster.client.create("pods", pod("a"), cluster.namespace)
        spec = made["spec"]
        assert spec["restartPolicy"] == "Always"
        assert spec["terminationGracePeriodSeconds"] == 30
        assert spec["dnsPolicy"] == "ClusterFirst"
        assert spec["serviceAccountName"] == "default"
        assert spec["enableServiceLinks"] is True
        assert spec["priority"] == 0
        assert made["status"]["phase"] == "Pending"
        assert made["status"]["qosClass"] == "BestEffort"
        assert spec["containers"][0]["imagePullPolicy"] == "IfNotPresent"

    async def test_without_a_scheduler_name_it_is_the_default_one(self, cluster: Cluster) -> None:
        plain = pod("a")
        del plain["spec"]["schedulerName"]
        made = await cluster.client.create("pods", plain, cluster.namespace, dryRun="All")
        assert made["spec"]["schedulerName"] == "default-scheduler"

    async def test_requests_default_to_limits(self, cluster: Cluster) -> None:
        made = await cluster.client.create(
            "pods",
            pod("a", containers=[limited(cpu="1", nvidia_com__gpu="2")]),
            cluster.namespace,
        )
        assert made["spec"]["containers"][0]["resources"]["requests"] == {
            "cpu": "1",
            "nvidia.com/gpu": "2",
        }

    @pytest.mark.parametrize(
        ("written", "stored"),
        [("3000", "3k"), ("1024Mi", "1Gi"), ("0.5", "500m"), ("1000m", "1"), ("1e3", "1e3")],
    )
    async def test_quantities_are_stored_canonically(
        self, cluster: Cluster, written: str, stored: str
    ) -> None:
        made = await cluster.client.create(
            "pods", pod("a", containers=[limited(memory=written)]), cluster.namespace
        )
        assert made["spec"]["containers"][0]["resources"]["limits"]["memory"] == stored

    async def test_numbers_are_taken_as_quantities(self, cluster: Cluster) -> None:
        one = container(resources={"limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}})
        made = await cluster.client.create("pods", pod("a", containers=[one]), cluster.namespace)
        limits = made["spec"]["containers"][0]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3k"}

    async def test_malformed_quantities_are_a_bad_request(self, cluster: Cluster) -> None:
        with refused(400, "BadRequest", "quantities must match the regular expression"):
            await cluster.client.create(
                "pods", pod("a", containers=[limited(memory="lots")]), cluster.namespace
            )

    async def test_fractions_of_extended_resources_are_refused(self, cluster: Cluster) -> None:
        with refused(422, "Invalid", "must be an integer") as refusal:
            await cluster.client.create(
                "pods", pod("a", containers=[limited(nvidia_com__gpu="500m")]), cluster.namespace
            )
        fields = {cause["field"] for cause in refusal.error.causes}
        assert "spec.containers[0].resources.limits[nvidia.com/gpu]" in fields

    async def test_extended_resources_need_a_limit_equal_to_the_request(
        self, cluster: Cluster
    ) -> None:
        alone = container(resources={"requests": {"nvidia.com/gpu": "1"}})
        with refused(422, "Invalid", "Limit must be set for non overcommitable resources"):
            await cluster.client.create("pods", pod("a", containers=[alone]), cluster.namespace)
        unequal = container(
            resources={"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}
        )
        with refused(422, "Invalid", "must be equal to nvidia.com/gpu limit of 2"):
            await cluster.client.create("pods", pod("a", containers=[unequal]), cluster.namespace)

    async def test_requests_over_limits_are_refused(self, cluster: Cluster) -> None:
        wrong = container(resources={"requests": {"cpu": "2"}, "limits": {"cpu": "1"}})
        with refused(422, "Invalid", "must be less than or equal to cpu limit of 1"):
            await cluster.client.create("pods", pod("a", containers=[wrong]), cluster.namespace)

    async def test_unknown_plain_resource_names_are_refused(self, cluster: Cluster) -> None:
        with refused(422, "Invalid", "must be a standard resource"):
            await cluster.client.create(
                "pods", pod("a", containers=[limited(gpus="1")]), cluster.namespace
            )

    async def test_container_names_and_images_are_required_and_unique(
        self, cluster: Cluster
    ) -> None:
        with refused(422, "Invalid", "spec.containers[0].image: Required value"):
            await cluster.client.create(
                "pods", pod("a", containers=[{"name": "x"}]), cluster.namespace
            )
        with refused(422, "Invalid", 'spec.containers[1].name: Duplicate value: "x"'):
            twice = [container("x"), container("x")]
            await cluster.client.create("pods", pod("a", containers=twice), cluster.namespace)

    async def test_mounts_must_name_a_volume(self, cluster: Cluster) -> None:
        mounted = container(volumeMounts=[{"name": "v", "mountPath": "/v"}])
        with refused(422, "Invalid", 'spec.containers[0].volumeMounts[0].name: Not found: "v"'):
            await cluster.client.create("pods", pod("a", containers=[mounted]), cluster.namespace)

    async def test_downward_annotation_volume_is_accepted_and_defaulted(
        self, cluster: Cluster
    ) -> None:
        made = pod("a")
        path = "metadata.annotations['main.limits.hami.io/v1']"
        made["spec"]["volumes"] = [
            {
                "name": "limits",
                "downwardAPI": {
                    "items": [{"path": "limits.json", "fieldRef": {"fieldPath": path}}]
                },
            },
            {"name": "region", "emptyDir": {"medium": "Memory", "sizeLimit": "1048576"}},
        ]
        found = await cluster.client.create("pods", made, cluster.namespace)
        volumes = {volume["name"]: volume for volume in found["spec"]["volumes"]}
        downward = volumes["limits"]["downwardAPI"]
        assert downward["defaultMode"] == 420
        assert downward["items"][0]["fieldRef"] == {"apiVersion": "v1", "fieldPath": path}
        assert volumes["region"]["emptyDir"]["sizeLimit"] == "1048576"

    async def test_downward_volume_refuses_other_fields(self, cluster: Cluster) -> None:
        made = pod("a")
        item = {"path": "x", "fieldRef": {"fieldPath": "spec.nodeName"}}
        made["spec"]["volumes"] = [{"name": "v", "downwardAPI": {"items": [item]}}]
        with refused(422, "Invalid", "Unsupported value"):
            await cluster.client.create("pods", made, cluster.namespace)

    async def test_most_of_the_spec_is_immutable(self, cluster: Cluster) -> None:
        made = await cluster.client.create("pods", pod("a"), cluster.namespace)
        for change in (
            {"schedulerName": "other"},
            {"nodeName": "somewhere"},
            {"restartPolicy": "Never"},
            {"priorityClassName": "system-node-critical"},
        ):
            with refused(422, "Invalid", "pod updates may not change fields other than"):
                await cluster.client.replace("pods", {**made, "spec": {**made["spec"], **change}})

    async def test_containers_cannot_be_added(self, cluster: Cluster) -> None:
        made = await cluster.client.create("pods", pod("a"), cluster.namespace)
        made["spec"]["containers"].append(container("second"))
        with refused(422, "Invalid", "pod updates may not add or remove containers"):
            await cluster.client.replace("pods", made)

    async def test_tolerations_may_only_be_added(self, cluster: Cluster) -> None:
        made = pod("a")
        made["spec"]["tolerations"] = [{"key": "k", "operator": "Exists"}]
        stored = await cluster.client.create("pods", made, cluster.namespace)
        stored["spec"]["tolerations"].append({"key": "l", "operator": "Exists"})
        stored = await cluster.client.replace("pods", stored)
        stored["spec"]["tolerations"] = []
        with refused(422, "Invalid", "existing toleration can not be modified"):
            await cluster.client.replace("pods", stored)

    async def test_generation_counts_spec_changes_only(self, cluster: Cluster) -> None:
        made = await cluster.client.create("pods", pod("a"), cluster.namespace)
        assert made["metadata"]["generation"] == 1
        labelled = await cluster.client.patch(
            "pods", "a", {"metadata": {"labels": {"x": "y"}}}, namespace=cluster.namespace
        )
        assert labelled["metadata"]["generation"] == 1
        changed = await cluster.client.patch(
            "pods", "a", {"spec": {"activeDeadlineSeconds": 100}}, namespace=cluster.namespace
        )
        assert changed["metadata"]["generation"] == 2

    async def test_status_is_written_through_its_own_path_only(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        patch = {"status": {"phase": "Running"}, "spec": {"schedulerName": "x"}}
        plain = await cluster.client.patch(
            "pods", "a", {"status": {"phase": "Running"}}, namespace=cluster.namespace
        )
        assert plain["status"]["phase"] == "Pending"
        through = await cluster.client.patch(
            "pods", "a", patch, namespace=cluster.namespace, subresource="status"
        )
        assert through["status"]["phase"] == "Running"
        assert through["spec"]["schedulerName"] == "nobody-schedules"

    async def test_priority_class_must_exist_and_gives_the_priority(self, cluster: Cluster) -> None:
        made = pod("a")
        made["spec"]["priorityClassName"] = "no-such-class"
        with refused(403, "Forbidden", "no PriorityClass with name no-such-class was found"):
            await cluster.client.create("pods", made, cluster.namespace)
        name = unique("class")
        resource = "priorityclasses.scheduling.k8s.io"
        await cluster.client.create(resource, {"metadata": {"name": name}, "value": 77})
        made["spec"]["priorityClassName"] = name

        async def known() -> bool:
            """Admission reads classes from a cache that follows the storage."""
            try:
                await cluster.client.create("pods", made, cluster.namespace)
            except StatusError as error:
                if error.code != 403:
                    raise
                return False
            return True

        await until(known)
        found = await cluster.client.get("pods", "a", cluster.namespace)
        assert found["spec"]["priority"] == 77
        await cluster.client.delete(resource, name)

    async def test_runtime_class_must_exist(self, cluster: Cluster) -> None:
        made = pod("a")
        made["spec"]["runtimeClassName"] = "no-such-runtime"
        with refused(403, "Forbidden", 'RuntimeClass "no-such-runtime" not found'):
            await cluster.client.create("pods", made, cluster.namespace)

    async def test_unbound_pods_are_deleted_at_once(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        gone = await cluster.client.delete("pods", "a", cluster.namespace)
        assert gone["kind"] == "Pod"
        assert not await exists(cluster.client, "pods", "a", cluster.namespace)

    async def test_bound_pods_wait_for_kubelet(self, cluster: Cluster) -> None:
        async with a_node(cluster.client) as node:
            await cluster.client.create("pods", pod("a"), cluster.namespace)
            await cluster.client.bind("a", node, namespace=cluster.namespace)
            await cluster.client.delete("pods", "a", cluster.namespace)
            found = await cluster.client.get("pods", "a", cluster.namespace)
            assert found["metadata"]["deletionGracePeriodSeconds"] == 30
            await cluster.client.delete("pods", "a", cluster.namespace, gracePeriodSeconds="0")
            assert not await exists(cluster.client, "pods", "a", cluster.namespace)

    async def test_grace_period_may_shrink_but_not_grow(self, cluster: Cluster) -> None:
        async with a_node(cluster.client) as node:
            await cluster.client.create("pods", pod("a"), cluster.namespace)
            await cluster.client.bind("a", node, namespace=cluster.namespace)
            seconds = []
            for grace in ("20", "60", "5"):
                await cluster.client.delete(
                    "pods", "a", cluster.namespace, gracePeriodSeconds=grace
                )
                found = await cluster.client.get("pods", "a", cluster.namespace)
                seconds.append(found["metadata"]["deletionGracePeriodSeconds"])
            assert seconds == [20, 20, 5]

    async def test_ephemeral_containers_have_their_own_path(self, cluster: Cluster) -> None:
        made = pod("a")
        made["spec"]["ephemeralContainers"] = [container("debug")]
        with refused(422, "Invalid", "cannot be set on create"):
            await cluster.client.create("pods", made, cluster.namespace)
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        patched = await cluster.client.patch(
            "pods",
            "a",
            {"spec": {"ephemeralContainers": [container("debug")]}},
            namespace=cluster.namespace,
            subresource="ephemeralcontainers",
            kind=STRATEGIC,
        )
        assert patched["spec"]["ephemeralContainers"][0]["name"] == "debug"
        with refused(422, "Invalid", "may not be removed"):
            await cluster.client.patch(
                "pods",
                "a",
                {"spec": {"ephemeralContainers": None}},
                namespace=cluster.namespace,
                subresource="ephemeralcontainers",
            )

    async def test_scheduling_gates_may_only_be_removed(self, cluster: Cluster) -> None:
        made = pod("a")
        made["spec"]["schedulingGates"] = [{"name": "example.com/wait"}]
        stored = await cluster.client.create("pods", made, cluster.namespace)
        assert stored["status"]["conditions"][0]["reason"] == "SchedulingGated"
        stored["spec"]["schedulingGates"].append({"name": "example.com/more"})
        with refused(422, "Invalid", "only deletion is allowed"):
            await cluster.client.replace("pods", stored)
        stored["spec"]["schedulingGates"] = []
        await cluster.client.replace("pods", stored)


class BindingContract:
    """The one write that places a pod (design D4)."""

    async def test_binding_sets_the_node_and_merges_annotations_at_once(
        self, cluster: Cluster
    ) -> None:
        made = await cluster.client.create(
            "pods", pod("a", annotations={"keep": "1", "change": "1"}), cluster.namespace
        )
        async with a_node(cluster.client) as node:
            answer = await cluster.client.bind(
                "a",
                node,
                namespace=cluster.namespace,
                uid=made["metadata"]["uid"],
                resource_version=made["metadata"]["resourceVersion"],
                annotations={"change": "2", "new": "3"},
            )
            assert answer["kind"] == "Status"
            assert answer["status"] == "Success"
            found = await cluster.client.get("pods", "a", cluster.namespace)
            assert found["spec"]["nodeName"] == node
            assert found["metadata"]["annotations"] == {"keep": "1", "change": "2", "new": "3"}
            scheduled = next(
                c for c in found["status"]["conditions"] if c["type"] == "PodScheduled"
            )
            assert scheduled["status"] == "True"

    async def test_binding_answers_201(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        async with a_node(cluster.client) as node:
            path = path_of("pods", cluster.namespace, "a", "binding")
            body = {
                "kind": "Binding",
                "apiVersion": "v1",
                "metadata": {"name": "a"},
                "target": {"kind": "Node", "name": node},
            }
            reply = await cluster.client.raw("POST", path, body=body)
            assert reply.code == 201

    async def test_binding_with_a_foreign_uid_conflicts(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        with refused(409, "Conflict", "Precondition failed: UID in precondition: other"):
            await cluster.client.bind("a", "n", namespace=cluster.namespace, uid="other")

    async def test_binding_with_a_stale_resource_version_conflicts(self, cluster: Cluster) -> None:
        made = await cluster.client.create("pods", pod("a"), cluster.namespace)
        await cluster.client.patch(
            "pods", "a", {"metadata": {"annotations": {"moved": "1"}}}, namespace=cluster.namespace
        )
        with refused(409, "Conflict", "Precondition failed: ResourceVersion in precondition"):
            await cluster.client.bind(
                "a",
                "n",
                namespace=cluster.namespace,
                uid=made["metadata"]["uid"],
                resource_version=made["metadata"]["resourceVersion"],
            )
        found = await cluster.client.get("pods", "a", cluster.namespace)
        assert "nodeName" not in found["spec"]

    async def test_a_pod_is_bound_once(self, cluster: Cluster) -> None:
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        async with a_node(cluster.client) as node:
            await cluster.client.bind("a", node, namespace=cluster.namespace)
            text = f'pod a is already assigned to node "{node}"'
            with refused(409, "Conflict", text):
                await cluster.client.bind("a", node, namespace=cluster.namespace)

    async def test_a_pod_being_deleted_is_not_bound(self, cluster: Cluster) -> None:
        made = pod("a", finalizers=["example.com/wait"])
        await cluster.client.create("pods", made, cluster.namespace)
        await cluster.client.delete("pods", "a", cluster.namespace)
        with refused(409, "Conflict", "is being deleted, cannot be assigned to a host"):
            await cluster.client.bind("a", "n", namespace=cluster.namespace)
        await cluster.client.patch(
            "pods", "a", {"metadata": {"finalizers": None}}, namespace=cluster.namespace
        )

    async def test_a_gated_pod_is_not_bound(self, cluster: Cluster) -> None:
        made = pod("a")
        made["spec"]["schedulingGates"] = [{"name": "example.com/wait"}]
        await cluster.client.create("pods", made, cluster.namespace)
        with refused(409, "Conflict", "non-empty .spec.schedulingGates"):
            await cluster.client.bind("a", "n", namespace=cluster.namespace)

    async def test_binding_an_absent_pod_is_not_found(self, cluster: Cluster) -> None:
        with refused(404, "NotFound", 'pods "a" not found'):
            await cluster.client.bind("a", "n", namespace=cluster.namespace)


class EvictionContract:
    """Evictions respect disruption budgets."""

    async def _running(self, client: KubeClient, namespace: str, node: str, name: str) -> None:
        await client.create("pods", pod(name, labels={"app": "x"}), namespace)
        await client.bind(name, node, namespace=namespace)
        await client.patch(
            "pods",
            name,
            {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}},
            namespace=namespace,
            subresource="status",
            kind=STRATEGIC,
        )

    async def test_eviction_is_refused_when_the_budget_is_used_up(self, cluster: Cluster) -> None:
        client, namespace = cluster.client, cluster.namespace
        async with a_node(client) as node:
            for name in ("a", "b"):
                await self._running(client, namespace, node, name)
            resource = "poddisruptionbudgets.policy"
            spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}
            await client.create(resource, {"metadata": {"name": "pdb"}, "spec": spec}, namespace)

            async def counted() -> bool:
                status = (await client.get(resource, "pdb", namespace)).get("status") or {}
                return bool(status.get("disruptionsAllowed") == 1)

            await until(counted)
            body = {"kind": "Eviction", "apiVersion": "policy/v1", "metadata": {"name": "a"}}
            done = await client.act("pods", "a", "eviction", body, namespace)
            assert done["status"] == "Success"
            found = await client.get("pods", "a", namespace)
            assert found["metadata"]["deletionTimestamp"]
            body["metadata"] = {"name": "b"}
            text = "Cannot evict pod as it would violate the pod's disruption budget."
            with refused(429, "TooManyRequests", text) as refusal:
                await client.act("pods", "b", "eviction", body, namespace)
            assert refusal.error.causes[0]["reason"] == "DisruptionBudget"
            for name in ("a", "b"):
                await client.delete("pods", name, namespace, gracePeriodSeconds="0")


class QuotaContract:
    """ResourceQuota for the standard keys."""

    async def _quota(self, cluster: Cluster, **hard: str) -> None:
        named = {key.replace("__", "/").replace("_", "."): value for key, value in hard.items()}
        client, namespace = cluster.client, cluster.namespace
        await client.create(
            "resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": named}}, namespace
        )

        async def counted() -> bool:
            quota = await client.get("resourcequotas", "q", namespace)
            return set((quota.get("status") or {}).get("hard") or {}) == set(named)

        await until(counted)

    async def test_requests_of_an_extended_resource_are_limited(self, cluster: Cluster) -> None:
        await self._quota(cluster, requests_nvidia_com__gpu="2")
        two = pod("a", containers=[limited(nvidia_com__gpu="2")])
        await cluster.client.create("pods", two, cluster.namespace)
        one = pod("b", containers=[limited(nvidia_com__gpu="1")])
        with refused(403, "Forbidden", 'pods "b" is forbidden: exceeded quota: q') as refusal:
            await cluster.client.create("pods", one, cluster.namespace)
        assert "used: requests.nvidia.com/gpu=2" in refusal.error.message
        assert "limited: requests.nvidia.com/gpu=2" in refusal.error.message
        await cluster.client.delete("pods", "a", cluster.namespace)

        async def freed() -> bool:
            quota = await cluster.client.get("resourcequotas", "q", cluster.namespace)
            return bool(quota["status"]["used"] == {"requests.nvidia.com/gpu": "0"})

        await until(freed)
        await cluster.client.create("pods", one, cluster.namespace)

    async def test_limits_of_an_extended_resource_are_stored_but_not_counted(
        self, cluster: Cluster
    ) -> None:
        await self._quota(cluster, limits_nvidia_com__gpumem="1")
        large = pod("a", containers=[limited(nvidia_com__gpumem="3000")])
        await cluster.client.create("pods", large, cluster.namespace)

    async def test_objects_are_counted(self, cluster: Cluster) -> None:
        await self._quota(cluster, pods="1")
        await cluster.client.create("pods", pod("a"), cluster.namespace)
        with refused(403, "Forbidden", "requested: pods=1, used: pods=1, limited: pods=1"):
            await cluster.client.create("pods", pod("b"), cluster.namespace)

    async def test_containers_must_set_the_limited_resources(self, cluster: Cluster) -> None:
        await self._quota(cluster, limits_memory="1Gi")
        with refused(403, "Forbidden", "must specify limits.memory for: main"):
            await cluster.client.create("pods", pod("a"), cluster.namespace)

    async def test_unknown_plain_names_are_refused(self, cluster: Cluster) -> None:
        with refused(422, "Invalid", "must be a standard resource for quota"):
            await cluster.client.create(
                "resourcequotas",
                {"metadata": {"name": "q"}, "spec": {"hard": {"gpus": "1"}}},
                cluster.namespace,
            )


class GarbageContract:
    """Effect of deleting an owner on its dependents."""

    async def _pair(self, cluster: Cluster) -> None:
        client, namespace = cluster.client, cluster.namespace
        owner = await client.create("configmaps", config_map("owner"), namespace)
        reference = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "owner",
            "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": True,
        }
        owned = config_map("owned", ownerReferences=[reference])
        await client.create("configmaps", owned, namespace)

    async def test_orphaned_dependents_lose_their_owner_and_stay(self, cluster: Cluster) -> None:
        await self._pair(cluster)
        client, namespace = cluster.client, cluster.namespace
        await client.delete("configmaps", "owner", namespace, propagationPolicy="Orphan")

        async def free() -> bool:
            if await exists(client, "configmaps", "owner", namespace):
                return False
            owned = await client.get("configmaps", "owned", namespace)
            return not owned["metadata"].get("ownerReferences")

        await until(free)

    async def test_foreground_deletion_waits_for_dependents(self, cluster: Cluster) -> None:
        await self._pair(cluster)
        client, namespace = cluster.client, cluster.namespace
        wait = {"metadata": {"finalizers": ["example.com/wait"]}}
        await client.patch("configmaps", "owned", wait, namespace=namespace)
        await client.delete("configmaps", "owner", namespace, propagationPolicy="Foreground")

        async def begun() -> bool:
            owned = await client.get("configmaps", "owned", namespace)
            return bool(owned["metadata"].get("deletionTimestamp"))

        await until(begun)
        owner = await client.get("configmaps", "owner", namespace)
        assert owner["metadata"]["finalizers"] == ["foregroundDeletion"]
        free = {"metadata": {"finalizers": None}}
        await client.patch("configmaps", "owned", free, namespace=namespace)

        async def gone() -> bool:
            return not await exists(client, "configmaps", "owner", namespace)

        await until(gone)

    async def test_dependents_of_an_owner_that_never_was_are_collected(
        self, cluster: Cluster
    ) -> None:
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "ghost", "uid": "no-such-uid"}
        owned = config_map("owned", ownerReferences=[reference])
        await cluster.client.create("configmaps", owned, cluster.namespace)

        async def gone() -> bool:
            return not await exists(cluster.client, "configmaps", "owned", cluster.namespace)

        await until(gone)
