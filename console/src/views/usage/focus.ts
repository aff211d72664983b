// SPDX-License-Identifier: Apache-2.0
// CSV with columns of the FinOps Open Cost and Usage Specification, the same as `hamictl usage -o csv`.

import type { Registry } from "../../../generated/api.ts";

type Cell = string | number | null;
const DIGITS = 6;

function hours(seconds: number): number {
  return seconds / 3600;
}

function timeOf(seconds: number): string {
  return new Date(Math.round(seconds * 1000)).toISOString();
}

/** The cells of one row by column. */
export function focusRow(
  answer: Registry.Consumption,
  row: Registry.ConsumptionRow,
): Record<string, Cell> {
  const { by } = answer;
  const named = by === "namespace" || by === "pod";
  const namespace = named ? (row.name.split("/")[0] ?? "") : answer.namespace;
  return {
    BilledCost: row.cost,
    BillingCurrency: answer.currency,
    ChargeCategory: "Usage",
    ChargePeriodStart: timeOf(answer.from_s),
    ChargePeriodEnd: timeOf(answer.to_s),
    ConsumedQuantity: hours(row.reserved_s),
    ConsumedUnit: "Device-Hours",
    ResourceId: by === "pod" || by === "node" ? row.name : null,
    ResourceType: by === "pod" ? "Pod" : by === "node" ? "Node" : null,
    ServiceCategory: "Compute",
    ServiceName: "HAMi",
    SkuId: by === "sku" ? (row.name.split("@")[0] ?? "") : null,
    SkuPriceId: by === "sku" ? row.name : null,
    SubAccountId: namespace,
    Tags:
      answer.label && row.name
        ? `{${JSON.stringify(answer.label)}: ${JSON.stringify(row.name)}}`
        : null,
    x_Queue: by === "queue" ? row.name : null,
    x_Model: by === "model" ? row.name : null,
    x_Class: by === "class" ? row.name : null,
    x_UsedHours: hours(row.used_s),
    x_WastedHours: hours(row.wasted_s),
    x_UnmeasuredHours: hours(row.unmeasured_s),
    x_IdleHours: hours(row.idle_s),
    x_OvercommittedHours: hours(row.overcommitted_s),
    x_WholeDeviceHours: hours(row.whole_s),
    x_WastedCost: row.wasted_cost,
    x_WholeDeviceCost: row.whole_cost,
    x_MemoryMiBHours: hours(row.memory_mib_s),
    x_CorePercentHours: hours(row.core_pct_s),
    x_ThrottledSeconds: row.throttled_s,
    x_MemoryRefusals: row.refusals,
    x_Allocations: row.allocations,
  };
}

function textOf(cell: Cell): string {
  if (cell === null) return "";
  if (typeof cell === "number") return cell.toFixed(DIGITS).replace(/\.?0+$/, "");
  return /[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

/** All rows as CSV (RFC 4180) with a header. */
export function csvOf(answer: Registry.Consumption): string {
  const names = Object.keys(focusRow(answer, answer.total));
  const rows = answer.items.map((row) => Object.values(focusRow(answer, row)).map(textOf));
  return [names, ...rows].map((cells) => `${cells.join(",")}\r\n`).join("");
}
