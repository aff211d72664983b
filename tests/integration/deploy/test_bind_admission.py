# SPDX-License-Identifier: Apache-2.0
"""The component bind-admission: one list of names reaches every object that depends on it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.admission.configuration import bind_by
from hami_scheduler.settings import BindAdmissionSettings
from tests.support.kustomize import overlay, rendered, rendering

KUSTOMIZE = Path(__file__).resolve().parents[3] / "deploy" / "kustomize"
COMPONENTS = KUSTOMIZE / "components"
BINDERS = "system:serviceaccount:volcano-system:volcano-scheduler,system:kube-scheduler"
pytestmark = [pytest.mark.real]
Obj = dict[str, Any]


def mine(directory: Path, *components: str) -> Path:
    """An overlay of the base with components, as docs/other-schedulers.md describes it."""
    example = yaml.safe_load((COMPONENTS / "bind-admission" / "example.yaml").read_text())
    example["data"] = {"schedulers": "volcano,default-scheduler", "binders": BINDERS}
    names = directory / "other-schedulers.yaml"
    names.write_text(yaml.safe_dump(example))
    paths = [COMPONENTS / name for name in components]
    return overlay(directory / "mine", KUSTOMIZE / "base", paths, files=[names])


def by_name(objects: list[Obj]) -> dict[tuple[str, str], Obj]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def container_of(objects: dict[tuple[str, str], Obj], service: str) -> Obj:
    spec = objects["Deployment", f"hami-{service}"]["spec"]["template"]["spec"]
    (container,) = (one for one in spec["containers"] if one["name"] == service)
    return dict(container)


def env_of(container: Obj) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container.get("env", ())}


@pytest.mark.parametrize("before", [(), ("hami-take-over",)])
def test_names_are_written_once(tmp_path: Path, before: tuple[str, ...]) -> None:
    objects = by_name(rendered(mine(tmp_path, *before, "bind-admission")))
    hooks = objects["MutatingWebhookConfiguration", "hami-webhook"]["webhooks"]
    (hook,) = (one for one in hooks if one["name"] == "bindings.hami.io")
    assert [one["expression"] for one in hook["matchConditions"]] == [bind_by(BINDERS)]
    policy = objects["ValidatingAdmissionPolicy", "allocation-annotations.hami.io"]["spec"]
    writers, exception = policy["matchConditions"]
    assert exception["expression"] == f"!({bind_by(BINDERS)})"
    assert ("kube-system:hami-scheduler" in writers["expression"]) is bool(before)
    schedulers = env_of(container_of(objects, "webhook"))["HAMI_WEBHOOK_POLICY__OTHER_SCHEDULERS"]
    assert schedulers == "volcano,default-scheduler"
    assert ("ConfigMap", "hami-other-schedulers") not in objects


def test_service_leads_to_the_schedulers_server(tmp_path: Path) -> None:
    objects = by_name(rendered(mine(tmp_path, "bind-admission")))
    hooks = objects["MutatingWebhookConfiguration", "hami-webhook"]["webhooks"]
    (hook,) = (one for one in hooks if one["name"] == "bindings.hami.io")
    target = hook["clientConfig"]["service"]
    service = objects["Service", target["name"]]["spec"]
    (port,) = service["ports"]
    assert port["port"] == target["port"]
    container = container_of(objects, "scheduler")
    defaults = BindAdmissionSettings()
    assert {"name": port["targetPort"], "containerPort": defaults.port} in container["ports"]
    assert env_of(container)["HAMI_SCHEDULER_BIND_ADMISSION__ENABLED"] == "true"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert str(Path(defaults.tls_cert_file).parent) in mounts
    assert defaults.wait_s < hook["timeoutSeconds"]


def test_missing_names_are_reported(tmp_path: Path) -> None:
    component = COMPONENTS / "bind-admission"
    told = rendering(overlay(tmp_path, KUSTOMIZE / "base", [component]))
    assert told.returncode != 0
    assert "hami-other-schedulers" in told.stderr
