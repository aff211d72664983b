// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { FleetView } from "./fleet.tsx";

export const fleet: View = {
  name: "fleet",
  path: "/fleet",
  titleKey: "fleet.title",
  icon: "M2 2h5v5H2zM9 2h5v5H9zM2 9h5v5H2zM9 9h5v5H9z",
  component: FleetView,
  needs: "GET /v1/fleet",
  group: "operate",
  order: 10,
};
