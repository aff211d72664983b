// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { CapacityView } from "./capacity.tsx";

export const capacity: View = {
  name: "capacity",
  path: "/capacity",
  titleKey: "capacity.title",
  icon: "M2 13V8M6 13V3M10 13V6M14 13V10",
  component: CapacityView,
  needs: "GET /v1/capacity",
  group: "operate",
  order: 30,
};
