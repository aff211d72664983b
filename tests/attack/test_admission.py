# SPDX-License-Identifier: Apache-2.0
"""Requests to the webhook from any caller: bounded in time, answered in words, never a dead end."""

import random
import string
import time
from collections.abc import Iterator, Mapping
from typing import Any

import anyio
import jsonpatch
import msgspec
import pytest

from hami_common.events import codec
from hami_common.events.decision import AdmissionRecord
from hami_common.pods import annotations
from tests.support.admission import Wired, asking_pod, patch_of, review
from tests.support.memorybus import MemoryBus, MemoryPublisher

pytestmark = pytest.mark.anyio

PROCESSOR_S = 0.25
"""The largest pod takes 50 ms of processor time where nothing else runs; see the measured value."""
VARIABLE = "NVIDIA_VISIBLE_DEVICES"

Document = dict[str, Any]


@pytest.fixture
def wired() -> Iterator[Wired]:
    wired = Wired(limit=10_000)
    yield wired
    wired.close()


def share(name: str = "main", **more: Any) -> Document:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    return {"name": name, "image": "app", "resources": {"limits": limits}, **more}


def pod_of(*containers: Document, **spec: Any) -> Document:
    pod = asking_pod()
    pod["spec"] = {"containers": list(containers), **spec}
    return pod


def crowd(
    containers: int,
    entries: int,
    *,
    filler_bytes: int = 0,
    limits: Mapping[str, str] | None = None,
) -> Document:
    """A pod with so many containers that request devices, and mounts, volumes, variables in all."""
    each = range(entries // containers)
    found = [
        share(
            f"c{number}",
            env=[{"name": f"CUDA_DEVICE_MEMORY_LIMIT_{i}", "value": "x"} for i in each],
            volumeMounts=[{"name": f"v{i}", "mountPath": f"/m{i}"} for i in each],
            args=["a"] * (filler_bytes // containers // 4),
        )
        for number in range(containers)
    ]
    for one in found:
        one["resources"]["limits"] |= limits or {}
    return pod_of(*found, volumes=[{"name": f"v{i}", "emptyDir": {}} for i in range(entries)])


async def processor_s(wired: Wired, body: bytes) -> float:
    """Processor time of one review, the least of three, because the machine has other work."""
    found = []
    for _ in range(3):
        started_s = time.process_time()
        await wired.post(body)
        found.append(time.process_time() - started_s)
    return min(found)


async def answer_to(wired: Wired, document: Any) -> Document:
    """The response; a request that cannot be read is a denial as well."""
    response = await wired.post(document)
    if response.status == 400:
        text = msgspec.json.decode(response.body)["error"]["message"]
        return {"allowed": False, "status": {"message": text}}
    assert response.status == 200, response.body
    found: Document = msgspec.json.decode(response.body)["response"]
    return found


async def text_of_denial(wired: Wired, pod: Document) -> str:
    response = await answer_to(wired, review(pod))
    assert not response["allowed"]
    text: str = response["status"]["message"]
    assert text
    return text


# --- time -------------------------------------------------------------------------------------


async def test_largest_pod_takes_little_processor_time(wired: Wired) -> None:
    body = msgspec.json.encode(review(crowd(200, 1000, filler_bytes=1_000_000)))
    assert (await answer_to(wired, body))["allowed"]
    assert await processor_s(wired, body) < PROCESSOR_S


async def test_largest_pod_that_names_many_vendors_takes_little_processor_time(
    wired: Wired,
) -> None:
    more = {
        "amd.com/gpu": "1",
        "huawei.com/Ascend910": "1",
        "mthreads.com/vgpu": "1",
        "cambricon.com/mlunum": "1",
        "hygon.com/dcunum": "1",
    }
    body = msgspec.json.encode(review(crowd(200, 1000, limits=more)))
    assert (await answer_to(wired, body))["allowed"]
    assert await processor_s(wired, body) < PROCESSOR_S


@pytest.mark.parametrize(
    ("containers", "entries"), [(1000, 0), (4000, 0), (10_000, 0), (1, 30_000)]
)
async def test_pod_beyond_the_bounds_is_denied_at_once(
    wired: Wired, containers: int, entries: int
) -> None:
    body = msgspec.json.encode(review(crowd(containers, entries * containers)))
    assert await processor_s(wired, body) < 2 * PROCESSOR_S
    response = await answer_to(wired, body)
    assert "write at most" in response["status"]["message"]


async def test_processor_time_grows_with_the_pod_and_no_faster(wired: Wired) -> None:
    half = msgspec.json.encode(review(crowd(100, 500, filler_bytes=500_000)))
    whole = msgspec.json.encode(review(crowd(200, 1000, filler_bytes=1_000_000)))
    await wired.post(whole)
    assert await processor_s(wired, whole) < 4 * await processor_s(wired, half)


async def test_reserved_annotations_are_removed_in_linear_time(wired: Wired) -> None:
    pod = crowd(1, 1)
    forged = {f"hami.io/x{number}-devices-allocated": "a" for number in range(24_000)}
    pod["metadata"]["annotations"] = forged
    assert await processor_s(wired, msgspec.json.encode(review(pod))) < 2 * PROCESSOR_S


@pytest.mark.parametrize("what", ["env", "volumeMounts", "volumes"])
async def test_bound_of_each_list_is_named(wired: Wired, what: str) -> None:
    pod = crowd(1, 1)
    entries = [{"name": f"x{i}", "mountPath": f"/x{i}"} for i in range(1020)]
    where = pod["spec"] if what == "volumes" else pod["spec"]["containers"][0]
    where[what] = entries
    text = await text_of_denial(wired, pod)
    assert f"{what}: 1020" in text
    assert "write at most 1000" in text


async def test_bounds_hold_for_ephemeral_containers_too(wired: Wired) -> None:
    old = pod_of(share())
    new = pod_of(share(), ephemeralContainers=[{"name": f"d{i}"} for i in range(300)])
    fields: Document = {"operation": "UPDATE", "old": old, "subResource": "ephemeralcontainers"}
    response = await answer_to(wired, review(new, **fields))
    assert "301 containers" in response["status"]["message"]


async def test_pod_at_the_bounds_is_unchanged_by_a_second_invocation(wired: Wired) -> None:
    pod = crowd(200, 1000)
    once = jsonpatch.apply_patch(pod, patch_of(await wired.answer(review(pod))))
    assert patch_of(await wired.answer(review(once))) == []


# --- words ------------------------------------------------------------------------------------


async def test_two_containers_of_one_name_are_denied_with_a_message(wired: Wired) -> None:
    twice = share(env=[{"name": VARIABLE, "value": "all"}])
    assert "same name" in await text_of_denial(wired, pod_of(share(), twice))


@pytest.mark.parametrize("field", ["limits", "requests"])
async def test_null_amounts_are_none(wired: Wired, field: str) -> None:
    other = "requests" if field == "limits" else "limits"
    one = share(resources={field: None, other: {"nvidia.com/gpucore": "30"}})
    response = await answer_to(wired, review(pod_of(one)))
    assert response["allowed"]


@pytest.mark.parametrize(
    "nothing",
    [
        {"metadata": {"labels": None, "annotations": None}},
        {"spec": {"volumes": None, "initContainers": None, "ephemeralContainers": None}},
        {"container": {"env": None, "volumeMounts": None, "envFrom": None}},
    ],
)
async def test_null_lists_are_empty(wired: Wired, nothing: Document) -> None:
    pod = pod_of(share(**nothing.get("container", {})))
    pod["metadata"] |= nothing.get("metadata", {})
    pod["spec"] |= nothing.get("spec", {})
    response = await wired.answer(review(pod))
    after = jsonpatch.apply_patch(pod, patch_of(response))
    assert after["metadata"]["labels"][annotations.MANAGED_LABEL] == "true"


@pytest.mark.parametrize("place", [b'"image":"app"', b'"name":"main"', b'"name":"train-0"'])
async def test_bytes_that_are_no_text_are_denied_with_a_message(wired: Wired, place: bytes) -> None:
    body = msgspec.json.encode(review(asking_pod()))
    assert place in body
    response = await answer_to(wired, body.replace(place, place[:-1] + b'\xff\xfe"'))
    if not place.startswith(b'"image'):
        assert not response["allowed"]
        assert response["status"]["message"]


async def test_number_of_thousands_of_digits_is_denied_with_a_message(wired: Wired) -> None:
    pod = asking_pod()
    weights = f"slot={'9' * 5000},core=1,memory=1"
    pod["metadata"]["annotations"] = {annotations.SCORING_WEIGHTS: weights}
    assert len(await text_of_denial(wired, pod)) < 4096


@pytest.mark.parametrize("depth", [500, 5_000, 200_000])
@pytest.mark.parametrize(
    "part", [b'"image":"app"', b'"metadata":{', b'"spec":{', b'"uid":"11111111', b'"dryRun":false']
)
async def test_nesting_is_read_or_denied_with_a_message(
    wired: Wired, depth: int, part: bytes
) -> None:
    body = msgspec.json.encode(review(asking_pod()))
    deep = b'"deep":' + b"[" * depth + b"]" * depth + b","
    response = await answer_to(wired, body.replace(part, deep + part, 1))
    assert response["allowed"] or response["status"]["message"]


async def test_error_of_one_review_denies_that_one_alone(wired: Wired) -> None:
    """A review that cannot be judged is denied, with a text, and counted."""
    broken = wired.clock.now_s
    wired.clock.now_s = None  # type: ignore[assignment,method-assign]  # a part that breaks
    response = await answer_to(wired, review(asking_pod()))
    assert not response["allowed"]
    assert "failed unexpectedly" in response["status"]["message"]
    assert wired.count("hami_webhook_admissions", operation="create", outcome="error") == 1
    wired.clock.now_s = broken  # type: ignore[method-assign]
    assert (await answer_to(wired, review(asking_pod())))["allowed"]


async def test_denial_of_a_very_long_text_is_short(wired: Wired) -> None:
    assert len(await text_of_denial(wired, asking_pod(gpu="x" * 1_000_000))) <= 4096


async def test_random_damage_never_ends_in_an_error(wired: Wired) -> None:
    """Values of a real review replaced by others of any type, 3,000 times."""
    choices = random.Random(13)
    values = [b"null", b'""', b"0", b"-1", b"9" * 30, b"1.5", b"true", b"[]", b"{}", b"[null]"]
    values += [b'{"a":null}', b'"\\u0000"', b'"all"']
    begin = pod_of(
        share(env=[{"name": VARIABLE, "value": "all"}], envFrom=[{"configMapRef": {}}]),
        {"name": "side", "volumeMounts": [{"name": "v", "mountPath": "/x"}]},
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    begin["metadata"]["annotations"] = {"a": "b", annotations.NODE_POLICY: "spread"}
    for _ in range(3_000):
        document = msgspec.json.decode(msgspec.json.encode(review(begin)))
        for _ in range(choices.randint(1, 3)):
            _damage(document["request"]["object"], choices, values)
        await answer_to(wired, document)
    for operation in ("create", "update", "ephemeral", "other"):
        assert wired.count("hami_webhook_admissions", operation=operation, outcome="error") == 0


def _damage(at: Any, choices: random.Random, values: list[bytes]) -> None:
    while True:
        places = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not places:
            return
        place = choices.choice(places)
        if isinstance(at[place], dict | list) and at[place] and choices.random() < 0.8:
            at = at[place]
            continue
        if isinstance(at, dict) and choices.random() < 0.3:
            key = "".join(choices.choices(string.printable, k=5))
            at[key] = msgspec.json.decode(choices.choice(values))
        at[place] = msgspec.json.decode(choices.choice(values))
        return


# --- granted devices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/etc//hami", "//etc/hami", "/etc/./hami", "/etc/x/../hami", "/etc/hami/", "etc/hami"),
        *("/etc//ld.so.preload", "/etc/ld.so.preload/", "/etc/hami/..data", "/run//hami/region"),
        *("/var/run/hami", "/var//run/./hami/x", "/run/hami-priority", "/var/run/hami-priority/p"),
        *("/usr/local/vgpu", "/usr/local/vgpu/libvgpu.so", "/usr/local/../local/vgpu"),
        *("/", "/etc", "/etc/", "/usr", "/usr/local", "/usr/local/", "/var/run", "/run"),
        *("/etc/vdev", "/hami-vnpu-shmem", "/proc/self/root/etc/hami", "/dev/fd/3/etc"),
        *("/var/run/nvidia-container-devices/all", "/run/nvidia-container-devices/all"),
    ],
)
@pytest.mark.parametrize("place", ["containers", "initContainers", "ephemeralContainers"])
async def test_mount_over_the_limiter_is_denied(wired: Wired, path: str, place: str) -> None:
    mount = {"name": "v", "mountPath": path, "subPath": "x"}
    volumes = [{"name": "v", "emptyDir": {}}]
    fields: Document = {}
    if place == "ephemeralContainers":
        debug = {"name": "debug", "targetContainerName": "main", "volumeMounts": [mount]}
        pod = pod_of(share(), volumes=volumes, ephemeralContainers=[debug])
        old = pod_of(share(), volumes=volumes)
        fields = {"operation": "UPDATE", "old": old, "subResource": "ephemeralcontainers"}
    else:
        pod = pod_of({"name": "app"}, volumes=volumes)
        pod["spec"][place] = [share(volumeMounts=[mount])]
    response = await answer_to(wired, review(pod, **fields))
    assert not response["allowed"]
    assert f"volumeMounts[{path}]" in response["status"]["message"]


@pytest.mark.parametrize(
    "mount",
    [
        {"name": "hami-region-main", "mountPath": "/etc/ld.so.preload", "subPath": "empty"},
        {"name": "hami-region-main", "mountPath": "/run/hami", "subPath": "x"},
        {"name": "hami-region-main", "mountPath": "/run/hami", "subPathExpr": "x"},
        {"name": "hami-region-main", "mountPath": "/run/hami/"},
        {"name": "hami-region-main", "mountPath": "/data"},
        {"name": "hami-limits-other", "mountPath": "/etc/hami"},
        {"name": "hami-limits-main", "mountPath": "/run/hami"},
    ],
)
async def test_limiter_volumes_are_mounted_exactly_or_refused(
    wired: Wired, mount: Document
) -> None:
    pod = pod_of(share(volumeMounts=[mount]), share("other"))
    assert mount["name"] in await text_of_denial(wired, pod)


@pytest.mark.parametrize(
    "limits", [{"nvidia.com/gpu": "0"}, {"nvidia.com/priority": "0"}, {"nvidia.com/gpu": "1"}]
)
@pytest.mark.parametrize(
    ("variable", "value"),
    [(VARIABLE, {"value": "all"}), ("AMD_VISIBLE_DEVICES", {"value": "all"})],
)
async def test_variable_that_gives_devices_is_removed(
    wired: Wired, limits: Mapping[str, str], variable: str, value: Document
) -> None:
    env = [{"name": variable, **value}, {"name": "MODE", "value": "x"}]
    pod = pod_of({"name": "main", "resources": {"limits": dict(limits)}, "env": env})
    answer = await wired.answer(review(pod))
    after = jsonpatch.apply_patch(pod, patch_of(answer))
    assert after["spec"]["containers"][0]["env"] == [{"name": "MODE", "value": "x"}]
    assert any(variable in warning for warning in answer["response"]["warnings"])


async def test_env_from_never_wins_over_the_node(wired: Wired) -> None:
    taken = [{"configMapRef": {"name": "cm"}}]
    pod = pod_of(share(envFrom=taken), {"name": "side", "envFrom": taken})
    after = jsonpatch.apply_patch(pod, patch_of(await wired.answer(review(pod))))
    for one in after["spec"]["containers"]:
        literals = {variable["name"]: variable["value"] for variable in one["env"]}
        assert literals[VARIABLE] == "void"
        assert literals["ASCEND_VISIBLE_DEVICES"] == "void"
    assert patch_of(await wired.answer(review(after))) == []


async def test_env_from_beside_a_share_that_a_literal_would_hide_is_denied(wired: Wired) -> None:
    npu = {"limits": {"huawei.com/Ascend910B3": "1"}}
    pod = pod_of({"name": "main", "resources": npu, "envFrom": [{"secretRef": {"name": "s"}}]})
    assert "container main: envFrom" in await text_of_denial(wired, pod)


@pytest.mark.parametrize("env", [[{"name": "CUDA_TASK_PRIORITY", "value": "0"}]])
async def test_task_priority_by_a_variable_counts_as_a_request(
    wired: Wired, env: list[Document]
) -> None:
    """The limiter reads the variable, so that the floor of a queue is measured."""
    pod = pod_of(share(env=env))
    after = jsonpatch.apply_patch(pod, patch_of(await wired.answer(review(pod))))
    assert after["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/priority"] == "0"
    assert patch_of(await wired.answer(review(after))) == []


async def test_task_priority_by_a_variable_from_elsewhere_is_removed(wired: Wired) -> None:
    field = {"fieldRef": {"fieldPath": "metadata.name"}}
    pod = pod_of(share(env=[{"name": "CUDA_TASK_PRIORITY", "valueFrom": field}]))
    after = jsonpatch.apply_patch(pod, patch_of(await wired.answer(review(pod))))
    assert after["spec"]["containers"][0]["env"] == []


@pytest.mark.parametrize("values", [("00",), ("8",), ("high",), ("",), ("1", "0")])
async def test_variable_that_is_no_task_priority_is_denied_with_the_fix(
    wired: Wired, values: tuple[str, ...]
) -> None:
    pod = pod_of(share(env=[{"name": "CUDA_TASK_PRIORITY", "value": v} for v in values]))
    text = await text_of_denial(wired, pod)
    assert "container main: env CUDA_TASK_PRIORITY" in text
    assert "write one number from 0 (highest) to 7" in text


@pytest.mark.parametrize("level", ["1", "2"])
async def test_variable_that_contradicts_the_resource_is_denied_with_the_fix(
    wired: Wired, level: str
) -> None:
    asker = share(env=[{"name": "CUDA_TASK_PRIORITY", "value": level}])
    asker["resources"]["limits"]["nvidia.com/priority"] = "0"
    text = await text_of_denial(wired, pod_of(asker))
    assert f"env CUDA_TASK_PRIORITY: {level} contradicts 0" in text
    assert "remove the variable or write the same level in both" in text


# --- callers ----------------------------------------------------------------------------------


async def stored(wired: Wired) -> list[tuple[str, str]]:
    """(request uid, message id) of the events that a bus kept, one for each id."""
    bus = MemoryBus()
    wired.events.end()
    with anyio.fail_after(30):
        await wired.events.run(MemoryPublisher(bus))
    found = {
        m.headers["ce-id"]: codec.decode(m.data, AdmissionRecord, what="event").request_uid
        for m in reversed(bus.published)
    }
    return [(uid, event_id) for event_id, uid in found.items()]


async def test_forged_review_cannot_take_the_place_of_a_true_event(wired: Wired) -> None:
    true = review(asking_pod())
    forged = review(asking_pod("forged"))
    assert forged["request"]["uid"] == true["request"]["uid"]
    await wired.answer(forged)
    await wired.answer(true)
    events = await stored(wired)
    assert len({event_id for _, event_id in events}) == 2


async def test_callers_without_certificate_cannot_flood_the_bus(wired: Wired) -> None:
    for _ in range(1_000):
        await wired.post(review(asking_pod()))
    assert len(await stored(wired)) <= 200
    assert wired.count("hami_webhook_events_dropped", cause="rate") >= 800


async def test_names_of_a_forged_review_are_no_event_when_they_cannot_be_true(
    wired: Wired,
) -> None:
    pod = asking_pod("n" * 100_000)
    await wired.post(review(pod))
    assert await stored(wired) == []
