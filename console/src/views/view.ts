// SPDX-License-Identifier: Apache-2.0

import type { ComponentType } from "preact";
import type { TextKey } from "../i18n.ts";

export const GROUPS = ["operate", "tenant", "manage"] as const;

export type ViewProps = { params: Readonly<Record<string, string | undefined>> };

export type View = {
  name: string;
  /** Below `/console`, for example `/workloads/:namespace?/:pod?`; its fixed start is the link of the navigation. */
  path: string;
  titleKey: TextKey;
  /** Path data of an icon of 16 × 16 that is drawn with lines. */
  icon: string;
  component: ComponentType<ViewProps>;
  group: (typeof GROUPS)[number];
  /** Position within its group. */
  order: number;
  /** True: reached from other views only. */
  isUnlisted?: boolean;
};

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
