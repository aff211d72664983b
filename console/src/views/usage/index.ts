// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { UsageView } from "./usage.tsx";

export const usage: View = {
  name: "usage",
  path: "/usage",
  titleKey: "usage.title",
  icon: "M2 14h12M3 14V9h3v5M6.5 14V3h3v11M10 14V6h3v8",
  component: UsageView,
  needs: "GET /v1/consumption",
  group: "tenant",
  order: 60,
};
