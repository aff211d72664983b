// SPDX-License-Identifier: Apache-2.0
// The document of /v1/fleet and of the events of /v1/fleet/events (docs/fleet.md, ADR 41). Memory in MiB, compute in
// percent of one device, times in Unix seconds.

import type { Registry } from "../../generated/api.ts";

export type FleetDocument = Registry.FleetDocument;

export type DeviceField = keyof FleetDocument["devices"];

/** Columns of a device that contain amounts. */
export const AMOUNTS = [
  "index",
  "memory_mib",
  "capacity_mib",
  "used_mib",
  "capacity_core_pct",
  "used_core_pct",
  "slots",
  "used_slots",
  "flags",
  "foreign_mib",
  "burst_mib",
  "offer_mib",
  "offer_core_pct",
] as const satisfies readonly DeviceField[];

/** Columns of a device that contain positions in `words`. */
export const WORDS = [
  "vendor",
  "model",
  "mode",
  "reason",
  "partitions",
  "stranded_by",
] as const satisfies readonly DeviceField[];

/** Bits of the column `flags`. */
export const CORDONED = 1;
export const UNHEALTHY = 2;
export const EXCLUSIVE = 4;
