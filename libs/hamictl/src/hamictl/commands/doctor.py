# SPDX-License-Identifier: Apache-2.0
"""``hamictl doctor``: checks the installation through registry, scheduler and Kubernetes API."""

from importlib.metadata import version

import click

from hami_common.events.asking import Finding
from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hamictl import checks, client, kube, options, output
from hamictl.errors import EXIT_NO, Absent, InputRefused, Refused, Unreachable


@click.command()
@click.option("--node", default="", help="Only ask the agent of this node.")
@options.services_namespace_option
@options.agents_namespace_option
@options.registry_option
@options.scheduler_option
@options.kubeconfig_option
@options.format_option
def doctor(  # noqa: PLR0917 - click passes them by name
    node: str,
    namespace: str,
    agents_namespace: str,
    registry: str,
    scheduler: str,
    kubeconfig: str,
    format_: str,
) -> None:
    """Check the installation and print each fault with its fix.

    Exits with 1 if a check failed; warnings exit with 0.
    """
    now_s = SystemClock().now_s()
    found: list[Finding] = []
    agents: checks.Checks | None = None
    output.progress("checking the registry and the agents")
    try:
        agents = client.read(checks.Checks, registry, "/v1/checks", node=node)
    except (Absent, Refused, Unreachable) as error:
        found.append(_unavailable("registry", error.message))
    else:
        found += checks.from_agents(agents, own_version=version("hamictl"), now_s=now_s)
    output.progress("checking the scheduler")
    try:
        client.fetch(scheduler, "/readyz")
    except (Absent, Refused, Unreachable) as error:
        found.append(_unavailable("scheduler", error.message))
    else:
        found.append(Finding(check="scheduler", verdict="PASS", text="it is ready"))
    output.progress("checking objects in the Kubernetes API")

    async def ask(api: KubeApi) -> list[Finding]:
        return await checks.ClusterDoctor(
            api,
            namespace=namespace,
            agents_namespace=agents_namespace,
            now_s=now_s,
            agents=None if node else agents,
        ).findings()

    try:
        found += kube.with_kube(kubeconfig, ask)
    except (Absent, Refused, Unreachable, InputRefused) as error:
        found.append(
            Finding(
                check="kubernetes",
                verdict="FAIL",
                text=error.message,
                fix="give --kubeconfig, or check that the API server is up",
            )
        )
    diagnosis = checks.diagnose(found)
    if not output.structured(diagnosis, format_):
        output.table(
            ["VERDICT", "CHECK", "NODE", "FOUND", "FIX"],
            checks.rows_of(diagnosis.findings, is_wide=format_ == "wide"),
            empty="No problems found.",
        )
        click.echo(
            f"{diagnosis.failed} failed, {diagnosis.warned} warnings, {diagnosis.passed} passed"
        )
    if diagnosis.failed:
        raise SystemExit(EXIT_NO)


def _unavailable(service: str, problem: str) -> Finding:
    return Finding(
        check=service,
        verdict="FAIL",
        text=f"the {service} does not answer: {problem}",
        fix=f"check the pods of hami-{service}, and kubectl port-forward with --{service}",
    )
