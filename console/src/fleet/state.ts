// SPDX-License-Identifier: Apache-2.0
// Which state of a device a viewer has to know first.

import { CORDONED, UNHEALTHY } from "./document.ts";
import { FIELD, type Fleet, type FleetNode, ROW } from "./store.ts";

/** Most urgent first; `stranded`: has free memory that no share can use (docs/fleet.md). */
export const STATES = [
  "silent",
  "unhealthy",
  "foreign",
  "cordoned",
  "stranded",
  "booked",
  "free",
] as const;

export type State = (typeof STATES)[number];

/** State of the device at a position of a node. */
export function stateOf(fleet: Fleet, node: FleetNode, at: number): State {
  const row = at * ROW;
  const flags = node.devices[row + FIELD.flags] ?? 0;
  if (fleet.silent.has(node.name)) return "silent";
  if (flags & UNHEALTHY) return "unhealthy";
  if ((node.devices[row + FIELD.foreign_mib] ?? 0) > 0) return "foreign";
  if (flags & CORDONED) return "cordoned";
  const cause = fleet.words.text(node.devices[row + FIELD.stranded_by] ?? 0);
  if (cause === "compute" || cause === "slots" || cause === "mode") return "stranded";
  return (node.devices[row + FIELD.used_slots] ?? 0) > 0 ? "booked" : "free";
}
