// SPDX-License-Identifier: Apache-2.0

import type { ComponentType } from "preact";
import type { RouteName } from "../api/rights.ts";
import type { TextKey } from "../i18n.ts";

export const GROUPS = ["operate", "tenant", "manage"] as const;

export type ViewProps = { params: Readonly<Record<string, string | undefined>> };

/** A result of the search at the top of the page. */
export type Found = {
  label: string;
  /** What it is, for example "Node". */
  kind: string;
  /** Below `/console`. */
  link: string;
};

export type View = {
  name: string;
  /** Below `/console`, for example `/workloads/:namespace?/:pod?`; its fixed start is the link of the navigation. */
  path: string;
  titleKey: TextKey;
  /** Path data of an icon of 16 × 16 that is drawn with lines. */
  icon: string;
  component: ComponentType<ViewProps>;
  /** The route without which the view is empty; the navigation has the view only for callers who may call it. */
  needs: RouteName;
  group: (typeof GROUPS)[number];
  /** Position within its group. */
  order: number;
  /** True: reached from other views only. */
  isUnlisted?: boolean;
  /** Objects of this view that contain the text, in lower case, from data that the browser has. */
  find?: (text: string) => readonly Found[];
};

/** The most results of a search. */
const FOUND_MOST = 12;

/** Views whose title contains the text, then what they find; nothing for an empty text. */
export function search(
  views: readonly View[],
  text: string,
  titleOf: (view: View) => string,
  viewKind: string,
): Found[] {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const titled = views
    .filter((view) => !view.isUnlisted && titleOf(view).toLowerCase().includes(wanted))
    .map((view) => ({ label: titleOf(view), kind: viewKind, link: linkOf(view) }));
  const objects = views.flatMap((view) => view.find?.(wanted).slice(0, FOUND_MOST) ?? []);
  return [...titled, ...objects].slice(0, FOUND_MOST);
}

/** The part of a path before its first parameter. */
export function linkOf(view: Pick<View, "path">): string {
  return view.path.replace(/\/[:*].*$/, "") || "/";
}

/** The views of a group in the order of the navigation. */
export function listed(views: readonly View[], group: View["group"]): View[] {
  return views
    .filter((view) => view.group === group && !view.isUnlisted)
    .sort((a, b) => a.order - b.order);
}
