// SPDX-License-Identifier: Apache-2.0
// What happened to a device: who held which part of it when, its health, faults and breaches.

import { useState } from "preact/hooks";
import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { formatMemory, formatPercent, formatTime } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language, namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Cut,
  Empty,
  Entries,
  Figure,
  Figures,
  HoursSelect,
  Memory,
  Page,
  Percent,
  PodLink,
  Status,
  Table,
  TimeAgo,
  toneOf,
} from "../../ui/index.ts";
import type { ViewProps } from "../view.ts";
import { Cordon } from "./cordon.tsx";
import "./device.css";
import { colorOfPod, lanesOf, positionOf } from "./lanes.ts";

const HOURS = [1, 6, 24, 72, 168];
const EVERY_S = 10;

export function DeviceView({ params }: ViewProps) {
  return <OneDevice node={params.node ?? ""} uuid={params.uuid ?? ""} />;
}

function healthOf(device: Registry.DeviceView) {
  return (
    <>
      <Status tone={device.healthy ? "ok" : "bad"}>
        {device.healthy ? t("device.healthy") : device.health_reason || t("device.unhealthy")}
      </Status>{" "}
      {device.cordoned ? <Status tone="warn">{t("device.cordoned")}</Status> : null}
    </>
  );
}

function OneDevice({ node, uuid }: { node: string; uuid: string }) {
  const [hours, setHours] = useState(24);
  const devices = useGet("/v1/devices", { query: { node }, everyS: EVERY_S });
  const timeline = useGet("/v1/timeline", {
    query: { node, uuid, hours, namespace: namespace.value },
    everyS: EVERY_S,
  });
  const device = devices.data?.items.find((one) => one.uuid === uuid);
  return (
    <Page
      title={device ? `${node} · ${device.index} · ${device.type}` : `${node} · ${uuid}`}
      intro={uuid}
      actions={
        <>
          {device ? (
            <Cordon node={node} uuid={uuid} isCordoned={device.cordoned} onDone={devices.reload} />
          ) : null}
          <HoursSelect choices={HOURS} value={hours} onChange={setHours} />
        </>
      }
    >
      <Answered answer={devices}>
        {() => (device ? <State device={device} /> : <Empty>{t("device.removed")}</Empty>)}
      </Answered>
      <Answered answer={timeline}>{(data) => <History timeline={data} />}</Answered>
    </Page>
  );
}

function State({ device }: { device: Registry.DeviceView }) {
  return (
    <Figures>
      <Figure label={t("device.health")} value={healthOf(device)} />
      <Figure
        label={t("device.booked")}
        value={<Memory mib={device.booked_mib} />}
        note={t("device.of", { total: formatMemory(device.capacity_mib, language.value) })}
      />
      <Figure
        label={t("device.core")}
        value={<Percent pct={device.booked_core_pct} />}
        note={t("device.of", { total: formatPercent(device.capacity_core_pct, language.value) })}
      />
      <Figure
        label={t("device.slots")}
        value={<Count value={device.booked_slots} />}
        note={t("device.of", { total: device.slots })}
      />
      {device.foreign_mib > 0 ? (
        <Figure
          label={t("device.foreign")}
          value={<Memory mib={device.foreign_mib} />}
          note={t("device.foreignNote")}
          tone="warn"
        />
      ) : null}
      {device.burst_mib > 0 ? (
        <Figure
          label={t("device.burst")}
          value={<Memory mib={device.burst_mib} />}
          note={t("device.burstNote")}
        />
      ) : null}
      <Figure
        label={t("device.isolation")}
        value={device.isolation.name}
        note={t("device.grades", {
          memory: device.isolation.memory,
          compute: device.isolation.compute,
          fault: device.isolation.fault,
          bandwidth: device.isolation.bandwidth ?? "D",
        })}
      />
    </Figures>
  );
}

function History({ timeline }: { timeline: Registry.Timeline }) {
  return (
    <>
      <Cut reason={timeline.cut} />
      <Card title={t("device.holders")}>
        {timeline.slices.length ? (
          <>
            <Lanes timeline={timeline} />
            <Slices slices={timeline.slices} />
          </>
        ) : (
          <Empty>{t("device.neverHeld")}</Empty>
        )}
      </Card>
      <Card title={t("device.changes")}>
        <Entries label={t("device.changes")} entries={timeline.entries} hasPod />
      </Card>
    </>
  );
}

function nameOf(slice: Registry.Slice): string {
  return slice.pod ? `${slice.namespace}/${slice.pod}` : t("device.anotherTenant");
}

function Lanes({ timeline }: { timeline: Registry.Timeline }) {
  const { from_s: from, until_s: until } = timeline;
  const { bars, count } = lanesOf(timeline.slices, from, until);
  const marks = timeline.entries.filter((one) => one.kind === "device" || one.kind === "breach");
  return (
    <div class="lanes">
      <div class="lanes-marks" aria-hidden="true">
        {marks.map((one) => {
          const at = positionOf(one.time_s, from, until);
          return at === undefined ? null : (
            <span
              key={`${one.sequence} ${one.what}`}
              class="lanes-mark"
              data-tone={toneOf(one)}
              title={`${formatTime(one.time_s * 1000, language.value)} ${tValue("entries.changes", one.what)} ${one.text}`}
              style={{ left: `${at}%` }}
            />
          );
        })}
      </div>
      <div
        class="lanes-bars"
        role="img"
        aria-label={t("device.lanesLabel", { count: bars.length })}
        style={{ height: `${count * 24}px` }}
      >
        {bars.map(({ slice, lane, left, width }) => (
          <span
            key={`${slice.allocation_id} ${slice.begin_s} ${lane}`}
            class="lanes-bar"
            data-color={slice.pod ? colorOfPod(slice.namespace, slice.pod) : "other"}
            title={`${nameOf(slice)} · ${formatMemory(slice.memory_mib, language.value)} · ${formatPercent(slice.core_pct, language.value)}`}
            style={{
              left: `min(${left}%, calc(100% - 8px))`,
              width: `max(${width}%, 8px)`,
              top: `${lane * 24}px`,
            }}
          >
            {nameOf(slice)}
          </span>
        ))}
      </div>
      <div class="lanes-axis muted">
        <span>{formatTime(from * 1000, language.value)}</span>
        <span>{formatTime(until * 1000, language.value)}</span>
      </div>
    </div>
  );
}

function Slices({ slices }: { slices: readonly Registry.Slice[] }) {
  const columns: Column<Registry.Slice>[] = [
    {
      key: "pod",
      title: t("device.holder"),
      value: nameOf,
      cell: (one) =>
        one.pod && !one.is_claim ? (
          <PodLink namespace={one.namespace} pod={one.pod} />
        ) : (
          nameOf(one)
        ),
    },
    {
      key: "begin",
      title: t("device.begin"),
      value: (one) => one.begin_s,
      cell: (one) => <TimeAgo ms={one.begin_s * 1000} />,
    },
    {
      key: "end",
      title: t("device.end"),
      value: (one) => one.end_s ?? Number.MAX_VALUE,
      cell: (one) =>
        one.end_s === null ? (
          <Status tone="ok">{t("device.held")}</Status>
        ) : (
          <TimeAgo ms={one.end_s * 1000} />
        ),
    },
    {
      key: "memory",
      title: t("device.memory"),
      align: "right",
      value: (one) => one.memory_mib,
      cell: (one) => <Memory mib={one.memory_mib} />,
    },
    {
      key: "core",
      title: t("device.core"),
      align: "right",
      value: (one) => one.core_pct,
      cell: (one) => <Percent pct={one.core_pct} />,
    },
    { key: "reason", title: t("device.reason"), value: (one) => one.reason },
  ];
  return (
    <Table
      label={t("device.holders")}
      rows={slices}
      columns={columns}
      rowKey={(one) => `${one.allocation_id} ${one.begin_s} ${one.memory_mib}`}
      initialOrder={{ key: "begin", isDescending: true }}
    />
  );
}
