# SPDX-License-Identifier: Apache-2.0
"""``hamictl explain sku`` for callers without a right on simulations."""

import json

import pytest
from click.testing import CliRunner

from hamictl import client
from hamictl.cli import main
from hamictl.errors import Refused

REFUSAL = "needs create simulations.hami.io"
SKU = client.Sku(
    name="s-8g",
    version=1,
    state="active",
    successor="",
    service_class="burstable",
    devices=1,
    memory_mib=8192,
    compute_pct=25,
    memory_limit_mib=12288,
    link="",
    min_isolation="",
    price_hour=0.4,
    alternatives=(
        client.SkuAlternative(
            vendor="nvidia",
            types=("A100",),
            limits={"nvidia.com/gpumem": "8192"},
            annotations={"hami.io/memory-limit": "main=12288"},
        ),
    ),
)


@pytest.fixture(autouse=True)
def tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry list the catalog, and the scheduler refuse its snapshot."""

    def read(*_: object) -> client.Skus:
        return client.Skus(
            digest="", problem="", currency="USD", required=False, neutral=(), items=(SKU,)
        )

    def fetch(*_: object) -> bytes:
        raise Refused(REFUSAL)

    monkeypatch.setattr(client, "read", read)
    monkeypatch.setattr(client, "fetch", fetch)


def test_tenant_sees_what_a_sku_expands_to_without_nodes() -> None:
    result = CliRunner().invoke(main, ["explain", "sku", "s-8g"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "SKU s-8g@1: active, burstable, 0.4 USD per hour",
        "  1. nvidia of types A100",
        "       hami.io/memory-limit: main=12288",
        "       nvidia.com/gpumem: 8192",
        f"  nodes unknown: {REFUSAL}",
    ]


def test_answer_as_json_has_the_reason() -> None:
    result = CliRunner().invoke(main, ["explain", "sku", "s-8g", "-o", "json"])
    answer = json.loads(result.output)
    assert answer["problem"] == REFUSAL
    assert [one["nodes"] for one in answer["alternatives"]] == [[]]
