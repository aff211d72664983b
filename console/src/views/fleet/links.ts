// SPDX-License-Identifier: Apache-2.0
// Addresses of other views, and how urgent a state is.

import type { State } from "../../fleet/state.ts";
import type { Tone } from "../../ui/index.ts";

export const TONES: Readonly<Record<State, Tone>> = {
  silent: "bad",
  unhealthy: "bad",
  foreign: "warn",
  cordoned: "warn",
  stranded: "warn",
  booked: "info",
  free: "neutral",
};

export function devicePath(node: string, uuid: string): string {
  return `/devices/${encodeURIComponent(node)}/${encodeURIComponent(uuid)}`;
}

export function workloadPath(namespace: string, pod: string): string {
  return `/workloads/${encodeURIComponent(namespace)}/${encodeURIComponent(pod)}`;
}

/** The map with the devices that a search finds. */
export function fleetPath(search: string): string {
  return `/fleet?q=${encodeURIComponent(search)}`;
}
