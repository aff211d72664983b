// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { PendingView } from "./pending.tsx";

export const pending: View = {
  name: "pending",
  path: "/pending/:namespace?/:pod?",
  titleKey: "pending.title",
  icon: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zM8 5v3.2l2 1.6",
  component: PendingView,
  needs: "GET /v1/waiting",
  group: "tenant",
  order: 10,
};
