# SPDX-License-Identifier: Apache-2.0
"""Measures the map of a large fleet in a headless Chromium, without a GPU.

Each run opens the map in a new profile:

- ``open_s``: from the navigation to the first paint of the map, of which ``snapshot_s`` is the wait
  for the snapshot's first byte. ``paint_s``: from its last byte to the paint.
- ``change_s``, ``change_worst_s``: median and worst time from the arrival of an event to its paint.
- ``pan_fps``: frames per second while the pointer drags the enlarged map and changes arrive;
  ``pan_frame_s``: 95th percentile of the time between frames.
- ``open_cpu_s``, ``pan_cpu_s``: CPU time of the page's main thread until the first paint, and per
  frame. It does not depend on what else runs on the machine as much as the times do.
"""

import shutil
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, async_playwright

FLAGS: Final = ("--no-sandbox", "--disable-gpu")
SIZE: Final = {"width": 1600, "height": 900}
ENLARGE: Final = 4
"""Clicks on the button that enlarges."""
WATCH_MS: Final = 6000
"""Time for which events are compared with paints."""

_WATCH: Final = """
window.seen = {arrived: [], painted: []};
new MutationObserver((changes) => {
  for (const change of changes) {
    const revision = Number(change.target.dataset?.painted ?? 0);
    if (revision) seen.painted.push([revision, performance.now()]);
  }
}).observe(document, {subtree: true, attributes: true, attributeFilter: ['data-painted']});
const plain = window.fetch;
window.fetch = async (...given) => {
  const answer = await plain(...given);
  if (!String(given[0]).startsWith('/v1/fleet/events')) return answer;
  const text = new TextDecoder();
  const noted = new TransformStream({transform(chunk, to) {
    const found = text.decode(chunk, {stream: true}).split('event: fleet').length - 1;
    for (let n = 0; n < found; n += 1) seen.arrived.push(performance.now());
    to.enqueue(chunk);
  }});
  return new Response(answer.body.pipeThrough(noted), answer);
};
"""

_OPENED: Final = """() => {
  const snapshot = performance.getEntriesByType('resource')
    .find((one) => one.name.endsWith('/v1/fleet'));
  return {
    open: seen.painted[0][1],
    wait: snapshot.responseStart - snapshot.requestStart,
    received: snapshot.responseEnd,
  };
}"""

# The snapshot is revision 1, so the event with number n is revision n + 2.
_DELAYS: Final = """() => seen.arrived.flatMap((at, n) => {
  const paint = seen.painted.find(([revision]) => revision >= n + 2);
  return paint ? [paint[1] - at] : [];
})"""

_PAN: Final = """async (frames) => {
  const canvas = document.querySelector('canvas');
  canvas.setPointerCapture = () => {};
  const box = canvas.getBoundingClientRect();
  let [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  const point = (type) => canvas.dispatchEvent(new PointerEvent(
    type, {bubbles: true, clientX: x, clientY: y, pointerId: 1, button: 0}));
  point('pointerdown');
  const times = [];
  await new Promise((done) => {
    const frame = (time) => {
      times.push(time);
      if (times.length > frames) return done();
      x += times.length % 120 < 60 ? -7 : 7;
      y += times.length % 60 < 30 ? -5 : 5;
      point('pointermove');
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
  point('pointerup');
  return times;
}"""


async def _run(browser: Browser, url: str) -> dict[str, float]:
    context = await browser.new_context(viewport=SIZE, locale="en-US")  # type: ignore[arg-type]
    try:
        page = await context.new_page()
        page.set_default_timeout(180_000)
        devtools = await context.new_cdp_session(page)
        await devtools.send("Performance.enable")

        async def cpu_s() -> float:
            metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
            return float(next(one["value"] for one in metrics if one["name"] == "ThreadTime"))

        await page.add_init_script(_WATCH)
        await page.goto(f"{url}/console/fleet")
        await page.locator("canvas[data-painted]").wait_for()
        open_cpu_s = await cpu_s()
        opened = await page.evaluate(_OPENED)
        await page.wait_for_timeout(WATCH_MS)
        delays = await page.evaluate(_DELAYS)
        for _ in range(ENLARGE):
            await page.get_by_role("button", name="Enlarge").click()
        before_s = await cpu_s()
        times = await page.evaluate(_PAN, 240)
        pan_cpu_s = await cpu_s() - before_s
        steps = sorted(after - before for before, after in pairwise(times))
        return {
            "open_s": opened["open"] / 1000,
            "snapshot_s": opened["wait"] / 1000,
            "paint_s": (opened["open"] - opened["received"]) / 1000,
            "change_s": statistics.median(delays) / 1000,
            "change_worst_s": max(delays) / 1000,
            "pan_fps": 1000 * (len(times) - 1) / (times[-1] - times[0]),
            "pan_frame_s": steps[int(len(steps) * 0.95)] / 1000,
            "open_cpu_s": open_cpu_s,
            "pan_cpu_s": pan_cpu_s / len(times),
        }
    finally:
        await context.close()


async def measure(url: str, runs: int) -> dict[str, Any]:
    """Open the map of the registry at ``url`` several times; least, median and largest values."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise FileNotFoundError("chromium is not installed")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            found = [await _run(browser, url) for _ in range(runs)]
        finally:
            await browser.close()
    return {"runs": runs} | {
        name: {
            "least": round(min(values), 4),
            "median": round(statistics.median(values), 4),
            "largest": round(max(values), 4),
        }
        for name in found[0]
        for values in [[one[name] for one in found]]
    }


def bundle_bytes(folder: Path) -> int:
    """Size of all files of the built console, compressed."""
    return sum(path.stat().st_size for path in folder.rglob("*.gz"))
