// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { DevicesView } from "./devices.tsx";

export const devices: View = {
  name: "devices",
  path: "/devices",
  titleKey: "devices.title",
  icon: "M8 1.5 15 14H1zM8 6v4M8 11.8v.6",
  component: DevicesView,
  needs: "GET /v1/fleet",
  group: "operate",
  order: 20,
};
