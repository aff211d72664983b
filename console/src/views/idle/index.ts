// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { IdleView } from "./idle.tsx";

export const idle: View = {
  name: "idle",
  path: "/idle",
  titleKey: "idle.title",
  icon: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M8 5v3l2 2",
  component: IdleView,
  needs: "GET /v1/idle",
  group: "operate",
  order: 70,
};
