# SPDX-License-Identifier: Apache-2.0
"""``hamictl bootstrap``: the options that make an installation a hub of regions."""

import pytest
from click.testing import CliRunner, Result

from hami_common.bus.nkeys import NKey
from hamictl.cli import main
from hamictl.commands import bootstrap
from hamictl.commands.bootstrap import Installation
from hamictl.errors import EXIT_INPUT

KEY = NKey.generate("user").public
ACCOUNT = NKey.generate("account").public


@pytest.fixture
def installations(monkeypatch: pytest.MonkeyPatch) -> list[Installation]:
    """Installations that the command was run for, without an API server."""
    found: list[Installation] = []

    async def note(installation: Installation, kubeconfig: str) -> list[str]:
        del kubeconfig
        found.append(installation)
        return []

    monkeypatch.setattr(bootstrap, "_bootstrap", note)
    return found


def run(*words: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["bootstrap", *words], env=env)


@pytest.mark.parametrize(
    ("env", "leaves"),
    [
        ({}, None),
        ({"HAMICTL_LEAVES": ""}, {}),
        ({"HAMICTL_LEAVES": f" east={KEY} ,"}, {"east": KEY}),
    ],
    ids=["no-hub", "empty", "one"],
)
def test_hub_is_one_before_its_first_region(
    installations: list[Installation], env: dict[str, str], leaves: dict[str, str] | None
) -> None:
    assert run(env=env).exit_code == 0
    assert installations[0].leaf_by_region == leaves


@pytest.mark.parametrize(
    "text",
    ["east", "east=", "east=UABC", f"east={KEY[:-1]}", f"east={ACCOUNT}", f"East={KEY}", f"={KEY}"],
    ids=["no-key", "empty", "short", "cut", "account", "capital", "no-name"],
)
def test_key_that_the_server_would_not_accept_is_refused(
    installations: list[Installation], text: str
) -> None:
    done = run("--leaves", text)
    assert (done.exit_code, installations) == (EXIT_INPUT, [])
    assert "is not REGION=KEY" in done.output


@pytest.mark.parametrize(
    "words",
    [("--region", "hub", "--hub", "tls://h:7422"), ("--leaves", f"hub={KEY}")],
    ids=["region", "leaf"],
)
def test_region_called_hub_is_refused_with_the_fix(
    installations: list[Installation], words: tuple[str, ...]
) -> None:
    done = run(*words)
    assert (done.exit_code, installations) == (EXIT_INPUT, [])
    assert "choose another, such as hub-east" in done.output
