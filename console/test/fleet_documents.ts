// SPDX-License-Identifier: Apache-2.0
// Makes documents of a fleet for tests.

import { AMOUNTS, type DeviceField, type FleetDocument, WORDS } from "../src/fleet/document.ts";

const ALLOCATION_WORDS = [
  "namespace",
  "state",
  "queue",
  "priority_class",
  "held_for",
  "origin",
] as const;

type Values = Record<string, string | number>;

export type AllocationContent = { values: Values; shares: Values[] };

export type NodeContent = {
  name: string;
  problem: string;
  devices: Values[];
  allocations: AllocationContent[];
};

/** Integers from 0 up to (excluding) the argument, the same ones for the same seed. */
export function chanceOf(seed: number): (below: number) => number {
  let state = seed * 2_654_435_761;
  return (below) => {
    state = (Math.imul(state ^ (state >>> 15), 0x2c1b3c6d) + 0x9e3779b9) | 0;
    return ((state >>> 8) & 0xffffff) % below;
  };
}

export function deviceOf(values: Values = {}): Values {
  return {
    vendor: "nvidia",
    index: 0,
    model: "NVIDIA H200",
    mode: "",
    memory_mib: 143_771,
    capacity_mib: 143_771,
    used_mib: 0,
    capacity_core_pct: 100,
    used_core_pct: 0,
    slots: 10,
    used_slots: 0,
    flags: 0,
    reason: "",
    partitions: "",
    foreign_mib: 0,
    burst_mib: 0,
    offer_mib: 143_771,
    offer_core_pct: 100,
    stranded_by: "",
    ...values,
  };
}

export function allocationOf(values: Values, ...shares: Values[]): AllocationContent {
  return {
    values: {
      namespace: "team-a",
      pod: "p",
      state: "running",
      queue: "",
      priority_class: "",
      held_for: "",
      origin: "",
      reserved_s: 1_763_683_200,
      ...values,
    },
    shares: shares.map((share) => ({
      device: 0,
      memory_mib: 1000,
      core_pct: 10,
      slots: 1,
      flags: 0,
      ...share,
    })),
  };
}

export function nodeOf(
  name: string,
  devices: Values[],
  allocations: NodeContent["allocations"] = [],
): NodeContent {
  return { name, problem: "", devices, allocations };
}

export function randomNode(
  chance: (below: number) => number,
  name: string,
  count = chance(6),
): NodeContent {
  const devices = Array.from({ length: count }, (_, index) =>
    deviceOf({
      index,
      model: ["A100", "H200", "L40S"][chance(3)] ?? "",
      used_mib: chance(1000),
      used_core_pct: chance(101),
      flags: chance(8),
      reason: chance(2) ? "XID 79" : "",
      foreign_mib: chance(3) ? 0 : chance(500),
    }),
  );
  const allocations = Array.from({ length: chance(4) }, () =>
    allocationOf(
      { namespace: `team-${chance(4)}`, pod: `pod-${chance(1000)}` },
      ...Array.from({ length: chance(3) }, () => ({
        device: chance(count + 1) - 1,
        memory_mib: chance(100),
        flags: chance(2) * 4,
      })),
    ),
  );
  return { name, problem: chance(4) ? "" : "driver missing", devices, allocations };
}

/** Nodes as one document, with the words in an order of their own. */
export function pack(
  nodes: readonly NodeContent[],
  { id = "1-1-1-1-1", silent = [] as string[] | null } = {},
): FleetDocument {
  const numbers = new Map([["", 0]]);
  const word = (text: unknown): number => {
    const known = numbers.get(String(text)) ?? numbers.size;
    numbers.set(String(text), known);
    return known;
  };
  const devices = nodes.flatMap((node) => node.devices);
  const booked = nodes.flatMap((node) => node.allocations);
  const allocations = booked.map((one) => one.values);
  const shares = booked.flatMap((one) => one.shares);
  const amounts = (rows: readonly Values[], name: string) => rows.map((row) => Number(row[name]));
  const words = (rows: readonly Values[], name: string) => rows.map((row) => word(row[name]));
  const columns = <Name extends string>(
    names: readonly Name[],
    column: (name: Name) => number[],
  ): Record<Name, number[]> =>
    Object.fromEntries(names.map((name) => [name, column(name)])) as Record<Name, number[]>;
  return {
    id,
    time_s: 1,
    namespace: "",
    nodes: {
      name: nodes.map((node) => node.name),
      problem: nodes.map((node) => word(node.problem)),
      devices: nodes.map((node) => node.devices.length),
      allocations: nodes.map((node) => node.allocations.length),
    },
    devices: {
      ...columns(WORDS, (name) => words(devices, name)),
      ...columns(AMOUNTS, (name) => amounts(devices, name)),
    } as Record<DeviceField, number[]>,
    allocations: {
      ...columns(ALLOCATION_WORDS, (name) => words(allocations, name)),
      pod: allocations.map((one) => String(one.pod)),
      reserved_s: amounts(allocations, "reserved_s"),
      shares: booked.map((one) => one.shares.length),
    },
    shares: columns(["device", "memory_mib", "core_pct", "slots", "flags"], (name) =>
      amounts(shares, name),
    ),
    words: [...numbers.keys()],
    silent,
  };
}
