// SPDX-License-Identifier: Apache-2.0
// The map of all devices. Pointer and keys move and enlarge it and choose a device.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { layOut, type Place, step } from "../../fleet/layout.ts";
import { t } from "../../i18n.ts";
import {
  firstPlace,
  lastPlace,
  type Pointed,
  pixelOf,
  placeOf,
  pointedOf,
  ratioOf,
  type Scene,
  Stage,
  ZOOM_STEP,
} from "./stage.ts";

/** Distance in CSS pixels from which a pressed pointer moves the map. */
const DRAG_PX = 4;
const ARROWS: Readonly<Record<string, readonly [-1 | 0 | 1, -1 | 0 | 1]>> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

export function FleetMap(
  props: Omit<Scene, "layout"> & {
    revision: number;
    /** Id of the element that describes the chosen device. */
    describedBy: string;
    onChoose: (pointed: Pointed | null) => void;
    onHover: (pointed: Pointed | null) => void;
    onOpen: () => void;
  },
) {
  const { fleet, revision, categories, search, colors, chosen, onChoose, onHover } = props;
  const frame = useRef<HTMLElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const stage = useMemo(() => new Stage(), []);
  const [size, setSize] = useState({ width: 0, height: 0 });
  // In steps, so that a small change of the window does not move every node.
  const aspect = size.height > 0 ? Math.round((size.width / size.height) * 4) / 4 : 1.5;
  const shape = fleet.shape;
  const layout = useMemo(() => layOut(fleet.nodes, aspect), [fleet, shape, aspect]);

  useLayoutEffect(() => {
    const element = frame.current;
    stage.attach(canvas.current);
    if (!element) return;
    const measure = () => setSize({ width: element.clientWidth, height: element.clientHeight });
    measure();
    const resized = new ResizeObserver(measure);
    resized.observe(element);
    return () => {
      resized.disconnect();
      stage.attach(null);
    };
  }, [stage]);

  useLayoutEffect(() => {
    stage.show({ fleet, layout, categories, search, colors, chosen });
  }, [stage, fleet, revision, layout, categories, search, colors, chosen]);

  useLayoutEffect(() => stage.resize(size.width, size.height), [stage, size]);

  useEffect(() => {
    const element = canvas.current;
    if (!element) return;
    function onWheel(event: WheelEvent): void {
      event.preventDefault();
      const distance = event.deltaMode === 0 ? event.deltaY : event.deltaY * 30;
      stage.zoom(Math.exp(-distance / 400), ...pixelOf(event));
    }
    // Not passive: the wheel must not scroll the page as well.
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  }, [stage]);

  const press = useRef<{ x: number; y: number; isDrag: boolean }>();

  function onPointerMove(event: PointerEvent): void {
    const pressed = press.current;
    if (!pressed) {
      hover(stage.pointedAt(...pixelOf(event)));
      return;
    }
    const [dx, dy] = [pressed.x - event.clientX, pressed.y - event.clientY];
    if (!pressed.isDrag && Math.hypot(dx, dy) < DRAG_PX) return;
    press.current = { x: event.clientX, y: event.clientY, isDrag: true };
    stage.move(dx * ratioOf(), dy * ratioOf());
  }

  function hover(pointed: Pointed | null): void {
    if (stage.hover(pointed)) onHover(pointed);
  }

  function onKeyDown(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = ARROWS[event.key];
    const place = chosen && placeOf(layout, chosen);
    if (arrow && event.shiftKey) stage.page(arrow[0] / 8, arrow[1] / 8);
    else if (arrow) choose(place ? step(layout, place, ...arrow) : firstPlace(layout));
    else if (event.key === "Home") choose(firstPlace(layout));
    else if (event.key === "End") choose(lastPlace(layout));
    else if (event.key === "+" || event.key === "=") stage.zoom(ZOOM_STEP);
    else if (event.key === "-") stage.zoom(1 / ZOOM_STEP);
    else if (event.key === "0") stage.showAll();
    else if (event.key === "Enter" && place) props.onOpen();
    else if (event.key === "Escape") onChoose(null);
    else return;
    event.preventDefault();
  }

  function choose(place: Place | null): void {
    if (!place) return;
    onChoose(pointedOf(layout, place));
    stage.reveal(place);
  }

  return (
    <div class="fleet-map">
      <section
        ref={frame}
        class="fleet-frame"
        role="application"
        aria-label={t("fleet.map.label", { count: layout.blocks.length })}
        aria-describedby={`fleet-keys ${props.describedBy}`}
        // biome-ignore lint/a11y/noNoninteractiveTabindex: it takes keys.
        tabIndex={0}
        onKeyDown={onKeyDown}
      >
        <canvas
          ref={canvas}
          aria-hidden="true"
          onPointerDown={(event) => {
            if (event.button !== 0) return;
            event.currentTarget.setPointerCapture(event.pointerId);
            press.current = { x: event.clientX, y: event.clientY, isDrag: false };
          }}
          onPointerMove={onPointerMove}
          onPointerUp={(event) => {
            const isClick = press.current?.isDrag === false;
            press.current = undefined;
            if (isClick) onChoose(stage.pointedAt(...pixelOf(event)));
          }}
          onPointerCancel={() => {
            press.current = undefined;
          }}
          onPointerLeave={() => hover(null)}
        />
      </section>
      <p id="fleet-keys" class="hidden">
        {t("fleet.map.keys")}
      </p>
      <div class="fleet-zoom">
        <ZoomButton label={t("fleet.map.in")} text="+" onClick={() => stage.zoom(ZOOM_STEP)} />
        <ZoomButton label={t("fleet.map.out")} text="−" onClick={() => stage.zoom(1 / ZOOM_STEP)} />
        <ZoomButton label={t("fleet.map.all")} text="⤢" onClick={() => stage.showAll()} />
      </div>
    </div>
  );
}

function ZoomButton(props: { label: string; text: string; onClick: () => void }) {
  return (
    <button
      type="button"
      class="button"
      aria-label={props.label}
      title={props.label}
      onClick={props.onClick}
    >
      {props.text}
    </button>
  );
}
