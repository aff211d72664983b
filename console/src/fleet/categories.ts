// SPDX-License-Identifier: Apache-2.0
// Colors for words such as namespaces. The words with the most booked memory get a color of their
// own and keep it while the page is open; the rest share one. A word that appears later gets a color
// that is left.

import { FIELD, type Fleet, type FleetNode, ROW, type Share } from "./store.ts";

/** Number of colors beside the one that the rest shares. */
export const COLORS = 10;
/** Position of the shared color. */
export const OTHERS = COLORS;

/** What a share is colored by; `model` colors devices. */
export const GROUPINGS = ["namespace", "queue", "priority_class", "model"] as const;
export type Grouping = (typeof GROUPINGS)[number];

export interface Entry {
  readonly word: string;
  readonly color: number;
  readonly used_mib: number;
}

export class Categories {
  readonly grouping: Grouping;
  readonly #colors = new Map<string, number>();

  constructor(grouping: Grouping) {
    this.grouping = grouping;
  }

  /** Word of a share, or of its device. */
  wordOf(fleet: Fleet, node: FleetNode, at: number, share: Share | null): string {
    if (this.grouping === "model") {
      return fleet.words.text(node.devices[at * ROW + FIELD.model] ?? 0);
    }
    return share?.allocation[this.grouping] ?? "";
  }

  /** Number of words with a color of their own; colors are only ever added. */
  get assigned(): number {
    return this.#colors.size;
  }

  /** Position of the word's color. */
  colorOf(word: string): number {
    return this.#colors.get(word) ?? OTHERS;
  }

  /** Words by booked memory, the largest first; those without a color get one that is left. */
  refresh(fleet: Fleet): Entry[] {
    const sums = new Map<string, number>();
    const add = (word: string, mib: number): void => {
      sums.set(word, (sums.get(word) ?? 0) + mib);
    };
    for (const node of fleet.nodes) {
      if (this.grouping === "model") {
        for (let at = 0; at < node.count; at += 1) {
          add(this.wordOf(fleet, node, at, null), node.devices[at * ROW + FIELD.used_mib] ?? 0);
        }
      } else {
        for (const share of node.shares) {
          add(this.wordOf(fleet, node, 0, share), share.memory_mib);
        }
      }
    }
    const sorted = [...sums].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
    for (const [word] of sorted) {
      if (this.#colors.size === COLORS) break;
      if (!this.#colors.has(word)) this.#colors.set(word, this.#colors.size);
    }
    return sorted.map(([word, used_mib]) => ({ word, used_mib, color: this.colorOf(word) }));
  }
}
