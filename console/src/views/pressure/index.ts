// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { PressureView } from "./pressure.tsx";

export const pressure: View = {
  name: "pressure",
  path: "/pressure",
  titleKey: "pressure.title",
  icon: "M2 12a6 6 0 0 1 12 0M8 12l3-4",
  component: PressureView,
  needs: "GET /v1/pressure",
  group: "operate",
  order: 40,
};
