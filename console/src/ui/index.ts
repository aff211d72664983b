// SPDX-License-Identifier: Apache-2.0
// Parts that views share.

export * from "./amounts.tsx";
export { Chart, colorOf, type Series } from "./chart.tsx";
export { Dialog } from "./dialog.tsx";
export * from "./entries.tsx";
export * from "./parts.tsx";
export { compare, type Order, type SortValue, sorted } from "./sort.ts";
export { type Column, Table } from "./table.tsx";
