// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { SystemView } from "./system.tsx";

export const system: View = {
  name: "system",
  path: "/system",
  titleKey: "system.title",
  icon: "M2.5 3h11v4h-11zM2.5 9h11v4h-11zM5 5h1M5 11h1",
  component: SystemView,
  needs: "GET /v1/system",
  group: "manage",
  order: 10,
};
