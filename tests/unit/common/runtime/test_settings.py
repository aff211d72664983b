# SPDX-License-Identifier: Apache-2.0
"""Settings: precedence, strictness, conversion of text, masking."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, field

from hami_common.errors import SettingsInvalid
from hami_common.runtime.settings import MASK, Loaded, ServiceSettings, load, masked


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cert_file: str = ""
    min_version: float = 1.2


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    weight: int = 1


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tls: Tls = Tls()
    retry_count: int = 3
    dry_run: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    limit: int | None = None
    signing_key: str = ""


def loaded(
    *argv: str, environ: dict[str, str] | None = None, toml: str = "", tmp_path: Path | None = None
) -> Loaded[Settings]:
    arguments = list(argv)
    if tmp_path is not None:
        path = tmp_path / "settings.toml"
        path.write_text(toml, encoding="utf-8")
        arguments += ["--config", str(path)]
    return load(Settings, service="scheduler", argv=arguments, environ=environ or {})


def refused(*argv: str, **more: Any) -> SettingsInvalid:
    with pytest.raises(SettingsInvalid) as caught:
        loaded(*argv, **more)
    return caught.value


def test_defaults_hold_when_nothing_is_given() -> None:
    result = loaded()
    assert result.settings == Settings()
    assert (result.check_only, result.config_path) == (False, None)


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    toml = 'retry_count = 1\nhttp_host = "file"\nlog_level = "DEBUG"\n[tls]\ncert_file = "file"\n'
    environ = {"HAMI_SCHEDULER_RETRY_COUNT": "2", "HAMI_SCHEDULER_HTTP_HOST": "env"}
    result = loaded("--set", "retry_count=4", environ=environ, toml=toml, tmp_path=tmp_path)
    settings = result.settings
    assert (settings.retry_count, settings.http_host, settings.log_level) == (4, "env", "DEBUG")
    assert settings.tls.cert_file == "file"
    assert result.config_path == tmp_path / "settings.toml"


def test_check_option_is_parsed() -> None:
    assert loaded("--check").check_only is True


@pytest.mark.parametrize(
    ("pair", "field", "wanted"),
    [
        ("dry_run=true", "dry_run", True),
        ("dry_run=FALSE", "dry_run", False),
        ("grace_s=2.5", "grace_s", 2.5),
        ("limit=7", "limit", 7),
        ("nats_urls=nats://a:1,nats://b:2", "nats_urls", ["nats://a:1", "nats://b:2"]),
        ('nats_urls=["nats://a:1"]', "nats_urls", ["nats://a:1"]),
        ("nats_urls=", "nats_urls", []),
        ('labels={"a": "1"}', "labels", {"a": "1"}),
        ("labels.zone=a=b", "labels", {"zone": "a=b"}),
        ("tls.min_version=1.3", "tls", Tls(min_version=1.3)),
        ('rules=[{"name": "x", "weight": 2}]', "rules", [Rule(name="x", weight=2)]),
        ("http_host=12", "http_host", "12"),
    ],
)
def test_text_is_converted_to_the_type_of_the_field(pair: str, field: str, wanted: object) -> None:
    assert getattr(loaded("--set", pair).settings, field) == wanted


def test_nested_fields_are_reached_from_the_environment() -> None:
    environ = {
        "HAMI_SCHEDULER_TLS__CERT_FILE": "/c",
        "HAMI_SCHEDULER_VENDORS__NVIDIA__DEFAULT_COUNT": "0",
    }
    settings = loaded(environ=environ).settings
    assert settings.tls.cert_file == "/c"
    assert settings.vendors.nvidia.default_count == 0


def test_variables_of_other_services_are_ignored() -> None:
    environ = {"HAMI_WEBHOOK_RETRY_COUNT": "9", "HAMI_SCHEDULERS": "x", "PATH": "/bin"}
    assert loaded(environ=environ).settings == Settings()


def test_variables_that_kubernetes_sets_for_a_service_of_the_same_name_are_ignored() -> None:
    environ = {
        "HAMI_SCHEDULER_SERVICE_HOST": "10.0.0.1",
        "HAMI_SCHEDULER_SERVICE_PORT": "443",
        "HAMI_SCHEDULER_SERVICE_PORT_HTTPS": "443",
        "HAMI_SCHEDULER_PORT": "tcp://10.0.0.1:443",
        "HAMI_SCHEDULER_PORT_443_TCP": "tcp://10.0.0.1:443",
        "HAMI_SCHEDULER_PORT_443_TCP_ADDR": "10.0.0.1",
    }
    assert loaded(environ=environ).settings == Settings()


@pytest.mark.parametrize(
    ("argv", "environ", "toml", "field", "fix"),
    [
        (("--set", "retry_cuont=1"), {}, "", "retry_cuont", "did you mean retry_count?"),
        ((), {"HAMI_SCHEDULER_GRACES": "1"}, "", "graces", "did you mean grace_s?"),
        ((), {}, "[tls]\ncertfile = 'x'\n", "tls.certfile", "did you mean tls.cert_file?"),
        ((), {}, "[[rules]]\nname='x'\nweightt=1\n", "rules[0].weightt", "rules[0].weight"),
        (("--set", "zzz=1"), {}, "", "zzz", "known keys: "),
        ((), {}, "queues_reload_s = 5.0", "queues_reload_s", "remove it; config_poll_s is in"),
        ((), {}, "trusted_key_files = 'x'", "trusted_key_files", "did you mean nats_token_file?"),
        (("--set", "grace_s.x=1"), {}, "", "grace_s.x", "set grace_s itself"),
        (
            ("--set", 'rules=[{"nname": "x"}]'),
            {},
            "",
            "rules[0].nname",
            "did you mean rules[0].name?",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(
    tmp_path: Path, argv: tuple[str, ...], environ: dict[str, str], toml: str, field: str, fix: str
) -> None:
    error = refused(*argv, environ=environ, toml=toml, tmp_path=tmp_path)
    assert error.field == field
    assert fix in error.fix


@pytest.mark.parametrize(
    ("argv", "toml", "field", "problem"),
    [
        (("--set", "retry_count=many"), "", "retry_count", "'many' is not a number"),
        (("--set", "retry_count=1.5"), "", "retry_count", "not a number"),
        (("--set", "dry_run=yes"), "", "dry_run", "not a truth value"),
        (("--set", "labels=x"), "", "labels", "not JSON"),
        (("--set", "log_level=LOUD"), "", "log_level", "Invalid enum value 'LOUD'"),
        ((), 'retry_count = "3"', "retry_count", "Expected `int`, got `str`"),
        ((), "retry_count = 3.5", "retry_count", "Expected `int`, got `float`"),
        ((), "[[rules]]\nweight = 1", "rules[0].name", "is missing"),
        ((), "tls = 3", "tls", "Expected `object`, got `int`"),
        (("--set", "tls.cert_file=x"), "tls = 3", "tls", "is not a table"),
    ],
)
def test_a_value_of_the_wrong_type_names_the_field(
    tmp_path: Path, argv: tuple[str, ...], toml: str, field: str, problem: str
) -> None:
    error = refused(*argv, toml=toml, tmp_path=tmp_path)
    assert error.field.removeprefix("$.") == field
    assert problem in error.problem


@pytest.mark.parametrize("argv", [("--bogus",), ("extra",), ("--conf", "x"), ("--set", "novalue")])
def test_a_wrong_command_line_is_a_settings_error(argv: tuple[str, ...]) -> None:
    assert refused(*argv).fix


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refused("--config", str(tmp_path / "none.toml")).problem
    assert "settings.toml" in refused(toml="a = ", tmp_path=tmp_path).field


def test_secrets_are_masked_and_passwords_cut_from_addresses() -> None:
    settings = Settings(
        signing_key="PRIVATE",
        nats_urls=["nats://me:pw@host:4222", "nats://host", "nats://token@host"],
        labels={"api_token": "t", "zone": "a"},
    )
    plain = masked(settings)
    assert plain["signing_key"] == MASK
    assert plain["nats_creds"] == "", "an empty secret is shown as empty"
    assert plain["nats_urls"] == [
        f"nats://me:{MASK}@host:4222",
        "nats://host",
        f"nats://{MASK}@host",
    ]
    assert plain["labels"] == {"api_token": MASK, "zone": "a"}
    assert plain["retry_count"] == 3
    assert "PRIVATE" not in str(plain)
    assert "pw" not in str(plain["nats_urls"])
