// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { WhatIfView } from "./whatif.tsx";

export const whatif: View = {
  name: "whatif",
  path: "/whatif",
  titleKey: "whatif.title",
  icon: "M6 6a2 2 0 1 1 2.7 1.9c-.5.2-.7.6-.7 1.1v.5M8 12.2v.3M14 8A6 6 0 1 1 2 8a6 6 0 0 1 12 0",
  component: WhatIfView,
  needs: "POST /v1/whatif/simulate",
  group: "operate",
  order: 60,
};
