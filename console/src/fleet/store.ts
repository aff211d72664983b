// SPDX-License-Identifier: Apache-2.0
// The fleet in memory: a snapshot, and documents that replace whole nodes (ADR 41).
//
// The numbers of a node's devices are one typed array, and words are numbered once for all documents, so that drawing
// 40,000 devices compares integers. A node is never changed in place: a document that changes it makes a new
// `FleetNode`, so results may be cached by node.

import { AMOUNTS, type DeviceField, EXCLUSIVE, type FleetDocument, WORDS } from "./document.ts";

const FIELDS: readonly DeviceField[] = [...AMOUNTS, ...WORDS];
/** Numbers per device in `FleetNode.devices`. */
export const ROW = FIELDS.length;
/** Place of each field in the row of a device. */
export const FIELD = Object.fromEntries(FIELDS.map((name, place) => [name, place])) as Readonly<
  Record<DeviceField, number>
>;

export type Allocation = {
  readonly namespace: string;
  readonly pod: string;
  readonly state: string;
  readonly queue: string;
  readonly priority_class: string;
  readonly held_for: string;
  readonly origin: string;
  readonly reserved_s: number;
};

/** What an allocation books on one device. */
export interface Share {
  readonly allocation: Allocation;
  /** Position among the node's devices; -1: the node no longer reports the device. */
  readonly device: number;
  readonly memory_mib: number;
  readonly core_pct: number;
  readonly slots: number;
  readonly exclusive: boolean;
}

export interface FleetNode {
  readonly name: string;
  readonly problem: string;
  /** Number of devices. */
  readonly count: number;
  /** `count` rows of `ROW` numbers. */
  readonly devices: Int32Array;
  /** Sorted by device. */
  readonly shares: readonly Share[];
  /** Shares of device `d` are `shares[starts[d]]` up to `shares[starts[d + 1]]`. */
  readonly starts: Uint32Array;
}

/** One device with its words as text, for lists and the detail panel. */
export type Device = Readonly<
  Record<(typeof AMOUNTS)[number], number> &
    Record<(typeof WORDS)[number], string> & {
      node: FleetNode;
      /** Position among the node's devices. */
      at: number;
    }
>;

/** Sums over all devices. */
export interface Totals {
  nodes: number;
  devices: number;
  capacity_mib: number;
  used_mib: number;
  capacity_core_pct: number;
  used_core_pct: number;
  foreign_mib: number;
  foreign_devices: number;
}

/** Words numbered in order of appearance; the empty word is 0. */
export class Words {
  readonly #numbers = new Map([["", 0]]);
  readonly #words = [""];

  number(word: string): number {
    let found = this.#numbers.get(word);
    if (found === undefined) {
      found = this.#words.length;
      this.#numbers.set(word, found);
      this.#words.push(word);
    }
    return found;
  }

  text(number: number): string {
    return this.#words[number] ?? "";
  }
}

/** All nodes of the fleet. */
export class Fleet {
  /** Position of the last document: the id to continue events from. */
  id = "";
  time_s = 0;
  namespace = "";
  words = new Words();
  silent: ReadonlySet<string> = new Set();
  /** Grows with each document. */
  revision = 0;
  /** Grows when a node appears or its number of devices changes: the map has another layout. */
  shape = 0;
  /** Sorted by name. */
  nodes: readonly FleetNode[] = [];
  #positions = new Map<string, number>();

  node(name: string): FleetNode | undefined {
    const position = this.#positions.get(name);
    return position === undefined ? undefined : this.nodes[position];
  }

  /** Replace everything by a snapshot. */
  load(snapshot: FleetDocument): void {
    const words = new Words();
    const nodes = unpack(snapshot, words);
    this.words = words;
    this.shape += 1;
    this.#sort(nodes);
    this.#take(snapshot);
  }

  /** Replace the nodes that an event contains. */
  apply(change: FleetDocument): void {
    const nodes = this.nodes.slice();
    const added: FleetNode[] = [];
    for (const node of unpack(change, this.words)) {
      const position = this.#positions.get(node.name);
      if (position === undefined) added.push(node);
      else nodes[position] = node;
      if (this.node(node.name)?.count !== node.count) this.shape += 1;
    }
    if (added.length > 0) this.#sort(nodes.concat(added));
    else this.nodes = nodes;
    this.#take(change);
  }

  #sort(nodes: FleetNode[]): void {
    nodes.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
    this.nodes = nodes;
    this.#positions = new Map(nodes.map((node, position) => [node.name, position]));
  }

  #take(document: FleetDocument): void {
    if (document.silent !== null) this.silent = new Set(document.silent);
    this.id = document.id;
    this.time_s = document.time_s;
    this.namespace = document.namespace;
    this.revision += 1;
  }

  /** The device at a position of a node. */
  device(node: FleetNode, at: number): Device {
    const value = (field: DeviceField): number => node.devices[at * ROW + FIELD[field]] ?? 0;
    return {
      ...Object.fromEntries(AMOUNTS.map((field) => [field, value(field)])),
      ...Object.fromEntries(WORDS.map((field) => [field, this.words.text(value(field))])),
      node,
      at,
    } as Device;
  }

  totals(): Totals {
    const sums: Totals = {
      nodes: 0,
      devices: 0,
      capacity_mib: 0,
      used_mib: 0,
      capacity_core_pct: 0,
      used_core_pct: 0,
      foreign_mib: 0,
      foreign_devices: 0,
    };
    for (const node of this.nodes) {
      sums.nodes += 1;
      sums.devices += node.count;
      for (let row = 0; row < node.devices.length; row += ROW) {
        sums.capacity_mib += node.devices[row + FIELD.capacity_mib] ?? 0;
        sums.used_mib += node.devices[row + FIELD.used_mib] ?? 0;
        sums.capacity_core_pct += node.devices[row + FIELD.capacity_core_pct] ?? 0;
        sums.used_core_pct += node.devices[row + FIELD.used_core_pct] ?? 0;
        const foreign = node.devices[row + FIELD.foreign_mib] ?? 0;
        sums.foreign_mib += foreign;
        if (foreign > 0) sums.foreign_devices += 1;
      }
    }
    return sums;
  }
}

/** Shares of a device, in the order of the document. */
export function sharesOf(node: FleetNode, at: number): readonly Share[] {
  return node.shares.slice(node.starts[at], node.starts[at + 1]);
}

/** Nodes of a document; `Error` when its columns do not fit together. */
function unpack(document: FleetDocument, words: Words): FleetNode[] {
  const numbers = document.words.map((word) => words.number(word));
  const { nodes, devices, allocations, shares } = document;
  check("devices", devices, sum(nodes.devices));
  check("allocations", allocations, sum(nodes.allocations));
  check("shares", shares, sum(allocations.shares));
  check("nodes", nodes, nodes.name.length);
  const columns = FIELDS.map((field) => devices[field]);
  const text = (position: number): string => {
    const word = document.words[position];
    if (word === undefined) throw new Error(`fleet document: word ${position} is missing`);
    return word;
  };
  let device = 0;
  let allocation = 0;
  let share = 0;
  return nodes.name.map((name, n) => {
    const count = nodes.devices[n] ?? 0;
    const rows = new Int32Array(count * ROW);
    for (let field = 0; field < ROW; field += 1) {
      const column = columns[field] as readonly number[];
      for (let d = 0; d < count; d += 1) {
        const value = column[device + d] ?? 0;
        rows[d * ROW + field] = field < AMOUNTS.length ? value : (numbers[value] ?? 0);
      }
    }
    device += count;
    const found: Share[] = [];
    for (
      const last = allocation + (nodes.allocations[n] ?? 0);
      allocation < last;
      allocation += 1
    ) {
      const a = allocation;
      const owner: Allocation = {
        namespace: text(allocations.namespace[a] ?? 0),
        pod: allocations.pod[a] ?? "",
        state: text(allocations.state[a] ?? 0),
        queue: text(allocations.queue[a] ?? 0),
        priority_class: text(allocations.priority_class[a] ?? 0),
        held_for: text(allocations.held_for[a] ?? 0),
        origin: text(allocations.origin[a] ?? 0),
        reserved_s: allocations.reserved_s[a] ?? 0,
      };
      for (const end = share + (allocations.shares[a] ?? 0); share < end; share += 1) {
        found.push({
          allocation: owner,
          device: shares.device[share] ?? -1,
          memory_mib: shares.memory_mib[share] ?? 0,
          core_pct: shares.core_pct[share] ?? 0,
          slots: shares.slots[share] ?? 0,
          exclusive: ((shares.flags[share] ?? 0) & EXCLUSIVE) !== 0,
        });
      }
    }
    found.sort((a, b) => a.device - b.device);
    const starts = new Uint32Array(count + 1);
    for (let d = 0, s = 0; d <= count; d += 1) {
      while (s < found.length && (found[s] as Share).device < d) s += 1;
      starts[d] = s;
    }
    return {
      name,
      problem: text(nodes.problem[n] ?? 0),
      count,
      devices: rows,
      shares: found,
      starts,
    };
  });
}

function sum(column: readonly number[]): number {
  return column.reduce((total, value) => total + value, 0);
}

function check(part: string, columns: object, length: number): void {
  for (const [name, column] of Object.entries(columns) as [string, readonly unknown[]][]) {
    if (column.length !== length) {
      throw new Error(
        `fleet document: ${part}.${name} has ${column.length} values instead of ${length}`,
      );
    }
  }
}
