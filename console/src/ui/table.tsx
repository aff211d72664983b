// SPDX-License-Identifier: Apache-2.0

import {
  elementScroll,
  observeElementOffset,
  observeElementRect,
  Virtualizer,
} from "@tanstack/virtual-core";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { t } from "../i18n.ts";
import { type Order, type SortValue, sorted } from "./sort.ts";

export type Column<Row> = {
  key: string;
  title: string;
  /** The value by which the column is sorted, and its text if `cell` is absent. */
  value: (row: Row) => SortValue;
  cell?: (row: Row) => ComponentChildren;
  align?: "right";
  /** False: the column cannot be sorted. */
  isSortable?: boolean;
};

/** Rows above which only the visible ones are in the document. */
const LONG = 200;
const ROW_PX = 28;

/** A table that sorts by its headings, and draws only the visible rows if it is long.
 *
 * With `onOpen`, rows take the focus: arrow keys, Home, End and the page keys move it, Enter opens.
 */
export function Table<Row>(props: {
  /** Names the table for screen readers. */
  label: string;
  rows: readonly Row[];
  columns: readonly Column<Row>[];
  rowKey: (row: Row) => string;
  onOpen?: (row: Row) => void;
  initialOrder?: Order;
}) {
  const { rows, columns, onOpen } = props;
  const [order, setOrder] = useState<Order | undefined>(props.initialOrder);
  const [focused, setFocused] = useState(0);
  const scroller = useRef<HTMLDivElement>(null);
  const body = useRef<HTMLTableSectionElement>(null);

  const shown = useMemo(() => {
    const column = columns.find((one) => one.key === order?.key);
    return column && order ? sorted(rows, column.value, order.isDescending) : rows;
  }, [rows, columns, order]);
  const isLong = shown.length > LONG;
  const virtual = useVirtual(scroller, shown.length, isLong);
  const current = Math.min(focused, shown.length - 1);

  function toggle(column: Column<Row>): void {
    setOrder((before) =>
      before?.key === column.key
        ? { key: column.key, isDescending: !before.isDescending }
        : { key: column.key, isDescending: column.align === "right" },
    );
  }

  function move(event: KeyboardEvent): void {
    const row = shown[current];
    if (event.key === "Enter" && row !== undefined && event.target instanceof HTMLTableRowElement) {
      onOpen?.(row);
      return;
    }
    const page = Math.max(1, Math.floor((scroller.current?.clientHeight ?? 0) / ROW_PX) - 1);
    const steps: Record<string, number> = {
      ArrowDown: current + 1,
      ArrowUp: current - 1,
      PageDown: current + page,
      PageUp: current - page,
      Home: 0,
      End: shown.length - 1,
    };
    const wanted = steps[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    const next = Math.min(Math.max(0, wanted), shown.length - 1);
    setFocused(next);
    virtual.show(next);
    requestAnimationFrame(() => {
      body.current?.querySelector<HTMLElement>(`[data-row="${next}"]`)?.focus();
    });
  }

  return (
    <div
      role="group"
      class={`table-frame ${isLong ? "long" : ""}`}
      ref={scroller}
      // biome-ignore lint/a11y/noNoninteractiveTabindex: a part that scrolls must be reachable by keyboard.
      tabIndex={0}
      aria-label={props.label}
    >
      <table class="table" aria-label={props.label} aria-rowcount={shown.length + 1}>
        <thead>
          <tr aria-rowindex={1}>
            {columns.map((column) => (
              <Heading key={column.key} column={column} order={order} onToggle={toggle} />
            ))}
          </tr>
        </thead>
        <tbody ref={body} onKeyDown={onOpen ? move : undefined}>
          <Spacer height={virtual.before} columns={columns.length} />
          {virtual.indexes.map((index) => {
            const row = shown[index];
            if (row === undefined) return null;
            return (
              <tr
                key={props.rowKey(row)}
                data-row={index}
                aria-rowindex={index + 2}
                class={onOpen ? "opens" : undefined}
                tabIndex={onOpen ? (index === current ? 0 : -1) : undefined}
                onFocus={() => setFocused(index)}
                onClick={
                  onOpen
                    ? (event) => {
                        if (!isControl(event.target)) onOpen(row);
                      }
                    : undefined
                }
              >
                {columns.map((column) => (
                  <td key={column.key} class={column.align}>
                    {column.cell ? column.cell(row) : column.value(row)}
                  </td>
                ))}
              </tr>
            );
          })}
          <Spacer height={virtual.after} columns={columns.length} />
        </tbody>
      </table>
    </div>
  );
}

function isControl(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest("a, button, input, select") !== null;
}

function Heading<Row>(props: {
  column: Column<Row>;
  order: Order | undefined;
  onToggle: (column: Column<Row>) => void;
}) {
  const { column, order } = props;
  if (column.isSortable === false) {
    return (
      <th scope="col" class={column.align}>
        {column.title}
      </th>
    );
  }
  const isSorted = order?.key === column.key;
  const direction = order?.isDescending ? "descending" : "ascending";
  return (
    <th scope="col" class={column.align} aria-sort={isSorted ? direction : undefined}>
      <button type="button" title={t("shell.sort")} onClick={() => props.onToggle(column)}>
        {column.title}
        <span class="sort-mark" aria-hidden="true">
          {isSorted ? (order?.isDescending ? "↓" : "↑") : ""}
        </span>
      </button>
    </th>
  );
}

function Spacer({ height, columns }: { height: number; columns: number }) {
  if (!height) return null;
  return (
    <tr aria-hidden="true">
      <td colSpan={columns} class="spacer" style={{ height: `${height}px` }} />
    </tr>
  );
}

type Virtual = {
  indexes: number[];
  /** Height of the rows that are not drawn, in pixels. */
  before: number;
  after: number;
  show: (index: number) => void;
};

function useVirtual(
  scroller: { current: HTMLDivElement | null },
  count: number,
  isLong: boolean,
): Virtual {
  const [, redraw] = useState(0);
  const virtualizer = useRef<Virtualizer<HTMLDivElement, HTMLTableRowElement>>();
  const options = {
    count: isLong ? count : 0,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_PX,
    overscan: 12,
    initialRect: { width: 0, height: 600 },
    scrollToFn: elementScroll,
    observeElementRect,
    observeElementOffset,
    onChange: () => redraw((before) => before + 1),
  };
  virtualizer.current ??= new Virtualizer(options);
  const virtual = virtualizer.current;
  virtual.setOptions({ ...virtual.options, count: options.count });
  useLayoutEffect(() => (isLong ? virtual._didMount() : undefined), [virtual, isLong]);
  useLayoutEffect(() => virtual._willUpdate());
  if (!isLong) {
    return { indexes: [...Array(count).keys()], before: 0, after: 0, show: () => undefined };
  }
  const items = virtual.getVirtualItems();
  return {
    indexes: items.map((item) => item.index),
    before: items[0]?.start ?? 0,
    after: virtual.getTotalSize() - (items.at(-1)?.end ?? 0),
    show: (index) => virtual.scrollToIndex(index, { align: "auto" }),
  };
}
