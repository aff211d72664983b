# SPDX-License-Identifier: Apache-2.0
"""Rendering of the configuration object: targets, resource names from the settings, mistakes."""

import base64
from pathlib import Path

import pytest
import yaml

from hami_webhook.app import main
from hami_webhook.shell.render import FLAG


def rendered(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main([FLAG, *argv]) == 0
    document: dict[str, object] = yaml.safe_load(capsys.readouterr().out)
    return document


def client_of(document: dict[str, object]) -> dict[str, object]:
    webhooks = document["webhooks"]
    assert isinstance(webhooks, list)
    first, second = (webhook["clientConfig"] for webhook in webhooks)
    assert first == second
    found: dict[str, object] = first
    return found


def test_service_and_authority_reach_the_client_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_bytes(b"PEM")
    document = rendered(
        capsys, "--service", "hami-system/hami-webhook", "--ca-file", str(authority), "--name", "x"
    )
    assert client_of(document) == {
        "service": {
            "namespace": "hami-system",
            "name": "hami-webhook",
            "path": "/mutate",
            "port": 443,
        },
        "caBundle": base64.b64encode(b"PEM").decode(),
    }
    assert document["metadata"] == {"name": "x", "labels": {"app.kubernetes.io/part-of": "hami"}}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://127.0.0.1:9443", "https://127.0.0.1:9443/mutate"),
        ("https://127.0.0.1:9443/", "https://127.0.0.1:9443/mutate"),
        ("https://127.0.0.1:9443/webhook", "https://127.0.0.1:9443/webhook"),
    ],
)
def test_url_without_a_path_leads_to_mutate(
    capsys: pytest.CaptureFixture[str], url: str, expected: str
) -> None:
    assert client_of(rendered(capsys, "--url", url)) == {"url": expected}


def test_resource_names_are_those_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    changed = "vendors.nvidia.resource_count_name=example.com/card"
    text = str(rendered(capsys, "--url", "https://h", "--set", changed))
    assert "example.com/card" in text
    assert "'nvidia.com/gpu'" not in text


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--url", "http://h"], "is not https"),
        (["--service", "only-name"], "no namespace or no name"),
        (["--url", "https://h", "--ca-file", "/nowhere/ca.crt"], "No such file"),
        (["--url", "https://h", "--set", "policy.scheduler=x"], "policy.scheduler"),
    ],
)
def test_invalid_setting_is_named_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    assert main([FLAG, *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert problem in output.err
