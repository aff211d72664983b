// SPDX-License-Identifier: Apache-2.0

import { Link } from "wouter-preact";
import type { Registry } from "../../generated/api.ts";
import { t, tValue } from "../i18n.ts";
import { Memory, Percent, TimeAgo } from "./amounts.tsx";
import { Empty, Status, type Tone } from "./parts.tsx";
import { type Column, Table } from "./table.tsx";

export function devicePath(node: string, uuid: string): string {
  return `/devices/${encodeURIComponent(node)}/${encodeURIComponent(uuid)}`;
}

export function workloadPath(namespace: string, pod: string): string {
  return `/workloads/${encodeURIComponent(namespace)}/${encodeURIComponent(pod)}`;
}

const BAD = new Set(["unhealthy", "failed", "vanished", "denied", "memory", "compute", "foreign"]);
const WARN = new Set(["cordoned", "filter: refused"]);
const OK = new Set(["healthy", "running", "uncordoned"]);

export function toneOf(entry: Registry.Entry): Tone {
  if (BAD.has(entry.what) && entry.kind !== "capacity") return "bad";
  if (WARN.has(entry.what)) return "warn";
  return OK.has(entry.what) ? "ok" : "neutral";
}

/** Changes of a node, device or pod as a table, the newest first. */
export function Entries(props: {
  label: string;
  entries: readonly Registry.Entry[];
  /** False: all entries are of the same pod. */
  hasPod: boolean;
}) {
  if (!props.entries.length) return <Empty>{t("entries.empty")}</Empty>;
  const columns: Column<Registry.Entry>[] = [
    {
      key: "time",
      title: t("entries.time"),
      value: (one) => one.time_s,
      cell: (one) => <TimeAgo ms={one.time_s * 1000} />,
    },
    { key: "kind", title: t("entries.kind"), value: (one) => tValue("entries.kinds", one.kind) },
    {
      key: "what",
      title: t("entries.what"),
      value: (one) => one.what,
      cell: (one) => <Status tone={toneOf(one)}>{tValue("entries.changes", one.what)}</Status>,
    },
    ...(props.hasPod
      ? [
          {
            key: "pod",
            title: t("entries.pod"),
            value: (one: Registry.Entry) => `${one.namespace}/${one.pod}`,
            cell: (one: Registry.Entry) => <PodLink namespace={one.namespace} pod={one.pod} />,
          },
        ]
      : []),
    {
      key: "memory",
      title: t("entries.memory"),
      align: "right",
      value: (one) => one.memory_mib ?? 0,
      cell: (one) => (one.memory_mib ? <Memory mib={one.memory_mib} /> : "–"),
    },
    {
      key: "core",
      title: t("entries.core"),
      align: "right",
      value: (one) => one.core_pct ?? 0,
      cell: (one) => (one.core_pct ? <Percent pct={one.core_pct} /> : "–"),
    },
    { key: "text", title: t("entries.text"), value: (one) => one.text ?? "" },
  ];
  return (
    <Table
      label={props.label}
      rows={props.entries}
      columns={columns}
      rowKey={(one) => `${one.sequence} ${one.kind} ${one.what} ${one.uuids?.join(" ")}`}
      initialOrder={{ key: "time", isDescending: true }}
    />
  );
}

export function PodLink({
  namespace = "",
  pod = "",
}: {
  namespace?: string | undefined;
  pod?: string | undefined;
}) {
  if (!pod) return <span class="muted">–</span>;
  return <Link href={workloadPath(namespace, pod)}>{`${namespace}/${pod}`}</Link>;
}

/** Tells that an answer is incomplete. */
export function Cut({ reason }: { reason: string }) {
  if (!reason) return null;
  return (
    <p class="banner" role="status">
      <Status tone="warn">{t("entries.cut", { reason })}</Status>
    </p>
  );
}

/** Chooses the number of hours. */
export function HoursSelect(props: {
  choices: readonly number[];
  value: number;
  onChange: (hours: number) => void;
}) {
  return (
    <label class="field">
      {t("entries.hours")}
      <select
        name="hours"
        value={props.value}
        onChange={(event) => props.onChange(Number(event.currentTarget.value))}
      >
        {props.choices.map((one) => (
          <option key={one} value={one}>
            {one < 48
              ? t("entries.lastHours", { count: one })
              : t("entries.lastDays", { count: one / 24 })}
          </option>
        ))}
      </select>
    </label>
  );
}
