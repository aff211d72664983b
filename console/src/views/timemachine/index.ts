// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { TimeMachineView } from "./timemachine.tsx";

export const timemachine: View = {
  name: "timemachine",
  path: "/timemachine",
  titleKey: "timemachine.title",
  icon: "M3 5.5A6 6 0 1 1 2 8M2 2.5v3h3M8 5v3.5l2.5 1.5",
  component: TimeMachineView,
  needs: "GET /v1/fleet",
  group: "operate",
  order: 70,
};
