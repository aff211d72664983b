// SPDX-License-Identifier: Apache-2.0
// Which containers waited or were refused memory, why, and which neighbors used their devices meanwhile.

import { useState } from "preact/hooks";
import { Link } from "wouter-preact";
import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { t } from "../../i18n.ts";
import { namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Cut,
  Duration,
  devicePath,
  Empty,
  HoursSelect,
  Memory,
  Page,
  Percent,
  PodLink,
  Status,
  Table,
} from "../../ui/index.ts";

const EVERY_S = 30;

export function PressureView() {
  const [hours, setHours] = useState(1);
  const answer = useGet("/v1/pressure", {
    query: { namespace: namespace.value, hours },
    everyS: EVERY_S,
  });
  return (
    <Page
      title={t("pressure.title")}
      intro={t("pressure.intro")}
      actions={<HoursSelect choices={[1, 6, 24]} value={hours} onChange={setHours} />}
    >
      <Answered answer={answer}>{(data) => <Containers pressure={data} />}</Answered>
    </Page>
  );
}

const keyOf = (one: Registry.ContainerPressure) => `${one.pod_uid} ${one.container}`;

function Containers({ pressure }: { pressure: Registry.Pressure }) {
  const [opened, setOpened] = useState("");
  const chosen = pressure.items.find((one) => keyOf(one) === opened) ?? pressure.items[0];
  return (
    <>
      <Cut reason={pressure.cut} />
      {chosen ? (
        <>
          <Card title={t("pressure.containers")}>
            <Table
              label={t("pressure.containers")}
              rows={pressure.items}
              columns={columns()}
              rowKey={keyOf}
              onOpen={(one) => setOpened(keyOf(one))}
              initialOrder={{ key: "waited", isDescending: true }}
            />
          </Card>
          <PressureDetails container={chosen} />
        </>
      ) : (
        <Empty>{t("pressure.empty")}</Empty>
      )}
    </>
  );
}

function columns(): Column<Registry.ContainerPressure>[] {
  return [
    {
      key: "pod",
      title: t("pressure.pod"),
      value: (one) => `${one.namespace}/${one.pod}`,
      cell: (one) => <PodLink namespace={one.namespace} pod={one.pod} />,
    },
    { key: "container", title: t("pressure.container"), value: (one) => one.container },
    { key: "node", title: t("pressure.node"), value: (one) => one.node },
    {
      key: "waited",
      title: t("pressure.waited"),
      align: "right",
      value: (one) => one.waited_s,
      cell: (one) => <Duration seconds={one.waited_s} />,
    },
    {
      key: "cause",
      title: t("pressure.cause"),
      value: (one) => one.cause,
      cell: (one) => <Cause container={one} />,
    },
    {
      key: "refusals",
      title: t("pressure.refusals"),
      align: "right",
      value: (one) => one.refusals,
      cell: (one) => <Count value={one.refusals} />,
    },
    {
      key: "recalls",
      title: t("pressure.recalls"),
      align: "right",
      value: (one) => one.recalls ?? 0,
      cell: (one) => <Count value={one.recalls ?? 0} />,
    },
    {
      key: "neighbor",
      title: t("pressure.busiest"),
      value: (one) => nameOf(busiestOf(one)),
    },
  ];
}

function busiestOf(one: Registry.ContainerPressure): Registry.Neighbor | undefined {
  return one.devices
    .flatMap((device) => device.neighbors)
    .sort((a, b) => b.device_time_s - a.device_time_s)[0];
}

function nameOf(neighbor: Registry.Neighbor | undefined): string {
  if (!neighbor) return "–";
  return neighbor.pod ? `${neighbor.namespace}/${neighbor.pod}` : t("pressure.anotherTenant");
}

/** Why launches of a container waited, as a sentence. */
export function Cause({ container }: { container: Registry.ContainerPressure }) {
  if (!container.cause) return <span class="muted">–</span>;
  return (
    <Status tone={container.cause === "limit" ? "info" : "warn"}>
      {t(`pressure.causes.${container.cause}`)}
    </Status>
  );
}

/** Waiting of one container by device, with the neighbors there. */
export function PressureDetails({ container }: { container: Registry.ContainerPressure }) {
  return (
    <Card
      title={t("pressure.details", {
        name: `${container.namespace}/${container.pod} ${container.container}`,
      })}
    >
      <p class="placeholder">
        {container.cause ? t(`pressure.advice.${container.cause}`) : t("pressure.advice.refused")}
      </p>
      {container.recalled_for?.length ? (
        <Table
          label={t("pressure.recalledFor")}
          rows={container.recalled_for}
          columns={recalledColumns()}
          rowKey={(one) => `${one.namespace}/${one.pod}/${one.container} ${one.moved_mib}`}
        />
      ) : null}
      {container.devices.map((device) => (
        <section key={device.uuid} aria-label={device.uuid}>
          <p class="placeholder">
            <Link href={devicePath(container.node, device.uuid)}>{device.uuid}</Link>
            {" · "}
            {t("pressure.own")} <Percent pct={device.core_pct} />
            {" / "}
            {device.limit_core_pct ? (
              <Percent pct={device.limit_core_pct} />
            ) : (
              t("pressure.noLimit")
            )}
            {" · "}
            {t("pressure.starved")} <Duration seconds={device.starved_s} />
          </p>
          {device.neighbors.length ? (
            <Table
              label={t("pressure.neighborsOf", { name: device.uuid })}
              rows={device.neighbors}
              columns={neighborColumns()}
              rowKey={(one) =>
                `${one.namespace}/${one.pod}/${one.container} ${one.device_time_s} ${one.used_mib}`
              }
            />
          ) : (
            <Empty>{t("pressure.alone")}</Empty>
          )}
        </section>
      ))}
    </Card>
  );
}

function causeOfMove(one: Registry.Recalled): string {
  if (one.is_requested) return t("pressure.requested");
  return one.pod ? `${one.namespace}/${one.pod}` : t("pressure.anotherTenant");
}

function recalledColumns(): Column<Registry.Recalled>[] {
  return [
    {
      key: "pod",
      title: t("pressure.recalledFor"),
      value: causeOfMove,
      cell: (one) =>
        one.pod ? <PodLink namespace={one.namespace} pod={one.pod} /> : causeOfMove(one),
    },
    {
      key: "container",
      title: t("pressure.container"),
      value: (one) => one.container || "–",
    },
    {
      key: "moves",
      title: t("pressure.recalls"),
      align: "right",
      value: (one) => one.moves,
      cell: (one) => <Count value={one.moves} />,
    },
    {
      key: "moved",
      title: t("pressure.moved"),
      align: "right",
      value: (one) => one.moved_mib,
      cell: (one) => <Memory mib={one.moved_mib} />,
    },
  ];
}

function neighborColumns(): Column<Registry.Neighbor>[] {
  return [
    {
      key: "pod",
      title: t("pressure.neighbor"),
      value: nameOf,
      cell: (one) => (one.pod ? <PodLink namespace={one.namespace} pod={one.pod} /> : nameOf(one)),
    },
    {
      key: "container",
      title: t("pressure.container"),
      value: (one) => one.container || "–",
    },
    {
      key: "priority",
      title: t("pressure.priority"),
      align: "right",
      value: (one) => one.priority,
    },
    {
      key: "time",
      title: t("pressure.deviceTime"),
      align: "right",
      value: (one) => one.device_time_s,
      cell: (one) => <Duration seconds={one.device_time_s} />,
    },
    {
      key: "core",
      title: t("pressure.core"),
      align: "right",
      value: (one) => one.core_pct,
      cell: (one) => <Percent pct={one.core_pct} />,
    },
    {
      key: "memory",
      title: t("pressure.memory"),
      align: "right",
      value: (one) => one.used_mib,
      cell: (one) => <Memory mib={one.used_mib} />,
    },
  ];
}
