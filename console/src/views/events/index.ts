// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { EventsView } from "./events.tsx";

export const events: View = {
  name: "events",
  path: "/events",
  titleKey: "events.title",
  icon: "M2 4h12M2 8h12M2 12h7",
  component: EventsView,
  needs: "GET /v1/events",
  group: "operate",
  order: 60,
};
