# SPDX-License-Identifier: Apache-2.0
"""The contract for admission webhooks: requests that they receive, effect of their responses."""

import base64
import itertools
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from hami_sim.kube import path_of
from tests.contract.kubeapi.support import (
    Cluster,
    Obj,
    container,
    limited,
    pod,
    refused,
    registered,
    until,
    webhook_server,
)

pytestmark = pytest.mark.anyio
ASKS = "object.spec.containers.exists(c, has(c.resources.limits) && 'nvidia.com/gpu' in c.resources.limits)"  # noqa: E501 - one expression


def patching(*operations: Obj, **more: Any) -> Any:
    encoded = base64.b64encode(msgspec.json.encode(list(operations))).decode()
    return lambda _request: {
        "allowed": True,
        "patchType": "JSONPatch",
        "patch": encoded,
        **more,
    }


async def in_force(cluster: Cluster, hook: Any, **fields: Any) -> None:
    """Wait until the server applies a registration to a dry run."""

    async def asked() -> bool:
        hook.requests.clear()
        await cluster.client.raw(
            "POST",
            path_of("pods", cluster.namespace),
            body=pod(generateName="probe-", **fields),
            query={"dryRun": "All"},
        )
        return bool(hook.requests)

    await until(asked)
    hook.requests.clear()


def on_bindings(cluster: Cluster, hook: Any, **fields: Any) -> AbstractAsyncContextManager[str]:
    """Register a mutating hook for Bindings, and for pods so that ``in_force`` sees it."""
    rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"]}
    rules = [{**rule, "resources": ["pods", "pods/binding", "bindings"]}]
    return registered(
        cluster, hook, mutating=True, rules=rules, sideEffects="NoneOnDryRun", **fields
    )


async def waiting_pod(cluster: Cluster, hook: Any, name: str, **metadata: Any) -> Obj:
    """Create a pod that waits for its binding, under a registration that is in force."""
    await in_force(cluster, hook)
    made = await cluster.client.create("pods", pod(name, **metadata), cluster.namespace)
    hook.requests.clear()
    return made


def binding_of(name: str) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n"},
    }


def placing(made: Obj, **notes: str) -> Any:
    """Bind this version of the pod, with these annotations beside those of the Binding."""

    def answer(request: Obj) -> Obj:
        before = request["object"]["metadata"]
        after = {
            **before,
            "uid": made["metadata"]["uid"],
            "resourceVersion": made["metadata"]["resourceVersion"],
            "annotations": {**(before.get("annotations") or {}), **notes},
        }
        return dict(patching({"op": "replace", "path": "/metadata", "value": after})(request))

    return answer


class AdmissionContract:
    """Webhooks."""

    async def test_mutating_webhook_sees_the_defaulted_object_and_its_patch_is_stored(
        self, cluster: Cluster
    ) -> None:
        async with webhook_server() as hook, registered(cluster, hook, mutating=True):
            hook.answer = patching(
                {"op": "add", "path": "/metadata/annotations", "value": {"seen": "yes"}},
                {"op": "replace", "path": "/spec/schedulerName", "value": "chosen"},
            )
            await in_force(cluster, hook)
            made = await cluster.client.create("pods", pod("a"), cluster.namespace)
            assert made["metadata"]["annotations"] == {"seen": "yes"}
            assert made["spec"]["schedulerName"] == "chosen"
            (request,) = hook.requests
            assert request["operation"] == "CREATE"
            assert request["kind"] == {"group": "", "version": "v1", "kind": "Pod"}
            assert request["resource"] == {"group": "", "version": "v1", "resource": "pods"}
            assert request["namespace"] == cluster.namespace
            assert request["userInfo"]["username"]
            assert request["object"]["kind"] == "Pod"
            assert request["object"]["spec"]["restartPolicy"] == "Always"
            assert request["dryRun"] is False
            assert not request.get("oldObject")

    async def test_mutating_webhook_sees_no_uid_and_no_generated_name(
        self, cluster: Cluster
    ) -> None:
        async with webhook_server() as hook, registered(cluster, hook, mutating=True):
            await in_force(cluster, hook)
            await cluster.client.create("pods", pod(generateName="g-"), cluster.namespace)
            (request,) = hook.requests
            assert not request["object"]["metadata"].get("uid")
            assert not request["object"]["metadata"].get("name")
            assert request["object"]["metadata"]["generateName"] == "g-"

    async def test_denial_carries_the_webhook_name_code_and_message(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, registered(cluster, hook, mutating=False) as name:
            await in_force(cluster, hook)
            hook.answer = lambda _request: {
                "allowed": False,
                "status": {"code": 403, "reason": "Forbidden", "message": "not today"},
            }
            text = f'admission webhook "{name}" denied the request: not today'
            with refused(403, "Forbidden", text):
                await cluster.client.create("pods", pod("a"), cluster.namespace)

    async def test_denial_without_a_code_is_a_bad_request(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, registered(cluster, hook, mutating=False):
            await in_force(cluster, hook)
            hook.answer = lambda _request: {"allowed": False}
            with refused(400, "", "denied the request without explanation"):
                await cluster.client.create("pods", pod("a"), cluster.namespace)

    async def test_warnings_reach_the_client(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, registered(cluster, hook, mutating=True):
            await in_force(cluster, hook)
            hook.answer = lambda _request: {"allowed": True, "warnings": ["mind the gap"]}
            reply = await cluster.client.raw(
                "POST", path_of("pods", cluster.namespace), body=pod("a")
            )
            assert reply.code == 201
            assert reply.headers["Warning"] == '299 - "mind the gap"'

    async def test_a_failing_call_under_fail_is_an_internal_error(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, registered(cluster, hook, mutating=True) as name:
            await in_force(cluster, hook)
            hook.answer = lambda _request: {"uid": "wrong", "allowed": True}
            with refused(500, "InternalError", f'failed calling webhook "{name}"'):
                await cluster.client.create("pods", pod("a"), cluster.namespace)

    async def test_a_failing_call_under_ignore_is_skipped(self, cluster: Cluster) -> None:
        async with (
            webhook_server() as hook,
            registered(cluster, hook, mutating=True, failurePolicy="Ignore"),
        ):
            await in_force(cluster, hook)
            hook.answer = lambda _request: {"uid": "wrong", "allowed": True}
            made = await cluster.client.create("pods", pod("a"), cluster.namespace)
            assert made["metadata"]["name"] == "a"

    async def test_an_untrusted_certificate_fails_the_call(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, webhook_server() as other:
            wrong = {"url": hook.url, "caBundle": other.ca_bundle}
            async with registered(cluster, hook, mutating=False, clientConfig=wrong):

                async def fails() -> bool:
                    reply = await cluster.client.raw(
                        "POST",
                        path_of("pods", cluster.namespace),
                        body=pod("a"),
                        query={"dryRun": "All"},
                    )
                    return reply.code == 500 and "certificate" in reply.json["message"]

                await until(fails)
                assert hook.requests == []

    async def test_match_conditions_choose_the_pods(self, cluster: Cluster) -> None:
        async with (
            webhook_server() as hook,
            registered(
                cluster,
                hook,
                mutating=True,
                matchConditions=[{"name": "asks", "expression": ASKS}],
            ),
        ):
            asking = pod("asking", containers=[container("x"), limited(nvidia_com__gpu="1")])

            async def asked() -> bool:
                await cluster.client.create("pods", asking, cluster.namespace, dryRun="All")
                return bool(hook.requests)

            await until(asked)
            hook.requests.clear()
            await cluster.client.create("pods", pod("plain"), cluster.namespace)
            assert hook.requests == []
            await cluster.client.create("pods", asking, cluster.namespace)
            assert [request["name"] for request in hook.requests] == ["asking"]

    async def test_match_conditions_that_do_not_compile_are_refused(self, cluster: Cluster) -> None:
        async with webhook_server() as hook:
            conditions = [{"name": "bad", "expression": "object.spec.containers.exists("}]
            with refused(422, "Invalid", "matchConditions[0].expression"):
                async with registered(cluster, hook, mutating=True, matchConditions=conditions):
                    pass

    async def test_object_selector_chooses_by_label(self, cluster: Cluster) -> None:
        async with (
            webhook_server() as hook,
            registered(
                cluster,
                hook,
                mutating=True,
                objectSelector={
                    "matchExpressions": [
                        {"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]}
                    ]
                },
            ),
        ):
            await in_force(cluster, hook)
            ignored = pod("a", labels={"hami.io/webhook": "ignore"})
            await cluster.client.create("pods", ignored, cluster.namespace)
            assert hook.requests == []

    async def test_ephemeral_containers_and_updates_reach_webhooks(self, cluster: Cluster) -> None:
        rules = [
            {
                "operations": ["CREATE", "UPDATE"],
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods", "pods/ephemeralcontainers"],
            }
        ]
        async with (
            webhook_server() as hook,
            registered(cluster, hook, mutating=False, rules=rules),
        ):
            await in_force(cluster, hook)
            await cluster.client.create("pods", pod("a"), cluster.namespace)
            await cluster.client.patch(
                "pods", "a", {"metadata": {"labels": {"x": "y"}}}, namespace=cluster.namespace
            )
            await cluster.client.patch(
                "pods",
                "a",
                {"spec": {"ephemeralContainers": [container("debug")]}},
                namespace=cluster.namespace,
                subresource="ephemeralcontainers",
            )
            await cluster.client.patch(
                "pods",
                "a",
                {"status": {"phase": "Running"}},
                namespace=cluster.namespace,
                subresource="status",
            )
            # A server that meets an object newer than its cache starts the write again and repeats
            # the call.
            asked = [(r["operation"], r.get("subResource", "")) for r in hook.requests]
            seen = [about for about, _ in itertools.groupby(asked)]
            assert seen == [("CREATE", ""), ("UPDATE", ""), ("UPDATE", "ephemeralcontainers")]
            assert hook.requests[1]["oldObject"]["metadata"].get("labels") is None

    async def test_bindings_reach_webhooks(self, cluster: Cluster) -> None:
        rules = [
            {
                "operations": ["CREATE"],
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods", "pods/binding"],
            }
        ]
        async with (
            webhook_server() as hook,
            registered(cluster, hook, mutating=False, rules=rules),
        ):
            await in_force(cluster, hook)
            await cluster.client.create("pods", pod("a"), cluster.namespace)
            await cluster.client.bind("a", "n", namespace=cluster.namespace, annotations={"k": "v"})
            request = hook.requests[-1]
            assert request["subResource"] == "binding"
            assert request["object"]["kind"] == "Binding"
            assert request["object"]["metadata"]["annotations"] == {"k": "v"}
            await cluster.client.delete("pods", "a", cluster.namespace, gracePeriodSeconds="0")

    async def test_webhook_adds_annotations_and_preconditions_to_a_binding(
        self, cluster: Cluster
    ) -> None:
        async with webhook_server() as hook, on_bindings(cluster, hook):
            made = await waiting_pod(cluster, hook, "a", annotations={"kept": "yes"})
            hook.answer = placing(made, forged="real", added="yes")
            await cluster.client.bind(
                "a", "n", namespace=cluster.namespace, annotations={"forged": "x", "own": "z"}
            )
            bound = await cluster.client.get("pods", "a", cluster.namespace)
            assert bound["spec"]["nodeName"] == "n"
            assert bound["metadata"]["annotations"] == {
                "kept": "yes",
                "forged": "real",
                "added": "yes",
                "own": "z",
            }
            (request,) = hook.requests
            assert (request["name"], request["dryRun"]) == ("a", False)
            await cluster.client.delete("pods", "a", cluster.namespace, gracePeriodSeconds="0")

    @pytest.mark.parametrize("field", ["uid", "resourceVersion"])
    async def test_precondition_that_a_webhook_adds_to_a_binding_is_enforced(
        self, cluster: Cluster, field: str
    ) -> None:
        async with webhook_server() as hook, on_bindings(cluster, hook):
            made = await waiting_pod(cluster, hook, "a")
            made["metadata"][field] = "1"
            hook.answer = placing(made, added="yes")
            with refused(409, "Conflict", "Precondition failed"):
                await cluster.client.bind("a", "n", namespace=cluster.namespace)
            left = await cluster.client.get("pods", "a", cluster.namespace)
            assert "nodeName" not in left["spec"]
            assert "annotations" not in left["metadata"]

    async def test_dry_run_of_a_binding_reaches_the_webhook_as_one(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, on_bindings(cluster, hook):
            made = await waiting_pod(cluster, hook, "a")
            hook.answer = placing(made, added="yes")
            path = f"{path_of('pods', cluster.namespace)}/a/binding"
            query = {"dryRun": "All"}
            reply = await cluster.client.raw("POST", path, body=binding_of("a"), query=query)
            assert reply.code == 201
            assert [request["dryRun"] for request in hook.requests] == [True]
            left = await cluster.client.get("pods", "a", cluster.namespace)
            assert "nodeName" not in left["spec"]

    async def test_collection_of_bindings_is_admitted_with_the_name_in_the_object(
        self, cluster: Cluster
    ) -> None:
        async with webhook_server() as hook, on_bindings(cluster, hook):
            made = await waiting_pod(cluster, hook, "a")
            hook.answer = placing(made, added="yes")
            path = path_of("bindings", cluster.namespace)
            reply = await cluster.client.raw("POST", path, body=binding_of("a"))
            assert reply.code == 201
            (request,) = hook.requests
            assert request["resource"]["resource"] in ("bindings", "pods")
            assert request["object"]["metadata"]["name"] == "a"
            bound = await cluster.client.get("pods", "a", cluster.namespace)
            assert bound["spec"]["nodeName"] == "n"
            assert bound["metadata"]["annotations"] == {"added": "yes"}
            await cluster.client.delete("pods", "a", cluster.namespace, gracePeriodSeconds="0")

    async def test_match_condition_on_the_user_chooses_the_bindings(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, on_bindings(cluster, hook):
            await waiting_pod(cluster, hook, "a")
            await cluster.client.bind("a", "n", namespace=cluster.namespace)
            username = hook.requests[0]["userInfo"]["username"]
            assert username
            await cluster.client.delete("pods", "a", cluster.namespace, gracePeriodSeconds="0")
        by_user = f"request.kind.kind == 'Pod' || request.userInfo.username != '{username}'"
        async with (
            webhook_server() as hook,
            on_bindings(cluster, hook, matchConditions=[{"name": "binder", "expression": by_user}]),
        ):
            await waiting_pod(cluster, hook, "b")
            await cluster.client.bind("b", "n", namespace=cluster.namespace)
            assert hook.requests == []
            await cluster.client.delete("pods", "b", cluster.namespace, gracePeriodSeconds="0")

    async def test_a_patched_pod_is_validated_again(self, cluster: Cluster) -> None:
        async with webhook_server() as hook, registered(cluster, hook, mutating=True):
            await in_force(cluster, hook)
            hook.answer = patching(
                {
                    "op": "add",
                    "path": "/spec/containers/0/resources",
                    "value": {"limits": {"nvidia.com/gpu": "1500m"}},
                }
            )
            with refused(422, "Invalid", "must be an integer"):
                await cluster.client.create("pods", pod("a"), cluster.namespace)

    async def test_reinvocation_runs_an_earlier_webhook_again_after_a_later_change(
        self, cluster: Cluster
    ) -> None:
        async with webhook_server() as first, webhook_server() as second:

            def count(request: Obj) -> Obj:
                found = request["object"]["metadata"].get("annotations") or {}
                seen = int(found.get("count", "0")) + 1
                value = {**found, "count": str(seen)}
                return dict(
                    patching({"op": "add", "path": "/metadata/annotations", "value": value})(
                        request
                    )
                )

            first.answer = count
            second.answer = patching(
                {"op": "add", "path": "/metadata/labels", "value": {"later": "yes"}}
            )
            async with (
                registered(
                    cluster, first, mutating=True, prefix="aa", reinvocationPolicy="IfNeeded"
                ),
                registered(cluster, second, mutating=True, prefix="zz"),
            ):
                await in_force(cluster, first)
                await in_force(cluster, second)
                first.requests.clear()
                second.requests.clear()
                made = await cluster.client.create("pods", pod("a"), cluster.namespace)
                assert made["metadata"]["annotations"]["count"] == "2"
                assert len(first.requests) == 2
                assert len(second.requests) == 1
