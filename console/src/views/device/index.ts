// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { DeviceView } from "./device.tsx";

export const device: View = {
  name: "device",
  path: "/devices/:node/:uuid",
  titleKey: "device.title",
  icon: "M3 4h10v8H3zM6 7h4v2H6zM1 6h2M1 10h2M13 6h2M13 10h2",
  component: DeviceView,
  needs: "GET /v1/timeline",
  group: "operate",
  order: 21,
  isUnlisted: true,
};
