// SPDX-License-Identifier: Apache-2.0
// Devices as a table: the map for those who cannot see it, and for sorting.

import { useMemo } from "preact/hooks";
import type { Search } from "../../fleet/search.ts";
import { STATES, type State, stateOf } from "../../fleet/state.ts";
import { FIELD, type Fleet, type FleetNode, ROW, sharesOf } from "../../fleet/store.ts";
import { t } from "../../i18n.ts";
import { language } from "../../preferences.ts";
import { type Column, Empty, Memory, type Order, Percent, Status, Table } from "../../ui/index.ts";
import { TONES } from "./links.ts";
import type { Pointed } from "./stage.ts";

type Row = { node: FleetNode; at: number };

const rowsByNode = new WeakMap<FleetNode, readonly Row[]>();

/** Rows of a node, the same objects as long as it does not change. */
function rowsOf(node: FleetNode): readonly Row[] {
  let rows = rowsByNode.get(node);
  if (rows === undefined) {
    rows = Array.from({ length: node.count }, (_, at) => ({ node, at }));
    rowsByNode.set(node, rows);
  }
  return rows;
}

function value({ node, at }: Row, field: number): number {
  return node.devices[at * ROW + field] ?? 0;
}

/** Namespaces with shares on the device. */
function namespacesOf({ node, at }: Row): string {
  const names = new Set(sharesOf(node, at).map((share) => share.allocation.namespace));
  return [...names].sort().join(", ");
}

export function DeviceTable(props: {
  fleet: Fleet;
  revision: number;
  label: string;
  search: Search;
  /** Only devices in these states. */
  states?: ReadonlySet<State>;
  initialOrder?: Order;
  onOpen: (pointed: Pointed) => void;
}) {
  const { fleet, revision, search, states } = props;
  const rows = useMemo(() => {
    const found: Row[] = [];
    for (const node of fleet.nodes) {
      const flags = search.isEmpty ? null : search.of(fleet, node);
      for (const row of rowsOf(node)) {
        if (
          (flags === null || flags[row.at]) &&
          (!states || states.has(stateOf(fleet, node, row.at)))
        )
          found.push(row);
      }
    }
    return found;
  }, [fleet, revision, search, states]);
  const locale = language.value;
  const columns = useMemo(() => columnsOf(fleet), [fleet, locale]);
  if (rows.length === 0) return <Empty>{t("fleet.table.empty")}</Empty>;
  return (
    <Table
      label={props.label}
      rows={rows}
      columns={columns}
      rowKey={({ node, at }) => `${node.name}/${at}`}
      {...(props.initialOrder ? { initialOrder: props.initialOrder } : {})}
      onOpen={({ node, at }) => props.onOpen({ node: node.name, at })}
    />
  );
}

function columnsOf(fleet: Fleet): Column<Row>[] {
  const word = (row: Row, field: number) => fleet.words.text(value(row, field));
  const reason = (row: Row) =>
    fleet.silent.has(row.node.name) ? row.node.problem : word(row, FIELD.reason);
  return [
    { key: "node", title: t("fleet.table.node"), value: (row) => row.node.name },
    {
      key: "index",
      title: t("fleet.table.index"),
      align: "right",
      value: (row) => value(row, FIELD.index),
    },
    { key: "model", title: t("fleet.table.model"), value: (row) => word(row, FIELD.model) },
    {
      key: "state",
      title: t("fleet.table.state"),
      value: (row) => STATES.indexOf(stateOf(fleet, row.node, row.at)),
      cell: (row) => {
        const state = stateOf(fleet, row.node, row.at);
        return <Status tone={TONES[state]}>{t(`fleet.states.${state}`)}</Status>;
      },
    },
    { key: "reason", title: t("fleet.table.reason"), value: reason },
    {
      key: "memory",
      title: t("fleet.table.memory"),
      align: "right",
      value: (row) => value(row, FIELD.used_mib),
      cell: (row) => (
        <>
          <Memory mib={value(row, FIELD.used_mib)} /> /{" "}
          <Memory mib={value(row, FIELD.capacity_mib)} />
        </>
      ),
    },
    {
      key: "compute",
      title: t("fleet.table.compute"),
      align: "right",
      value: (row) => value(row, FIELD.used_core_pct),
      cell: (row) => <Percent pct={value(row, FIELD.used_core_pct)} />,
    },
    {
      key: "foreign",
      title: t("fleet.table.foreign"),
      align: "right",
      value: (row) => value(row, FIELD.foreign_mib),
      cell: (row) => <Memory mib={value(row, FIELD.foreign_mib)} />,
    },
    {
      key: "burst",
      title: t("fleet.table.burst"),
      align: "right",
      value: (row) => value(row, FIELD.burst_mib),
      cell: (row) => <Memory mib={value(row, FIELD.burst_mib)} />,
    },
    {
      key: "partitions",
      title: t("fleet.table.partitions"),
      value: (row) => word(row, FIELD.partitions),
    },
    { key: "namespaces", title: t("fleet.table.namespaces"), value: namespacesOf },
  ];
}
