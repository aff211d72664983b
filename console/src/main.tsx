// SPDX-License-Identifier: Apache-2.0

import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { App } from "./shell/app.tsx";

const place = document.getElementById("app");
if (place) render(<App />, place);
