// SPDX-License-Identifier: Apache-2.0
// Bundles src/main.tsx into the folder given as argument: index.html and files with their content's
// hash in their names under assets/, each beside its gzip-compressed copy.

import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { basename, extname, join } from "node:path";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

/** Largest sum of the compressed files, in bytes. */
const LIMIT = 300_000;
const PREFIX = "/console/assets/";

const root = join(import.meta.dirname, "..");
const out = process.argv[2];
if (!out) throw new Error("usage: node scripts/bundle.ts FOLDER");
const assets = join(out, "assets");
mkdirSync(assets, { recursive: true });

const result = await build({
  absWorkingDir: root,
  entryPoints: { app: "src/main.tsx" },
  bundle: true,
  format: "esm",
  target: ["es2022", "chrome111", "firefox115", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  minify: true,
  legalComments: "none",
  entryNames: "[name]-[hash]",
  outdir: assets,
  metafile: true,
  define: { "process.env.NODE_ENV": '"production"' },
});

const names = Object.keys(result.metafile.outputs).map((path) => basename(path));
const script = names.find((name) => extname(name) === ".js");
const style = names.find((name) => extname(name) === ".css");
if (!script || !style) throw new Error("the bundle lacks a script or a style sheet");

const iconHash = createHash("sha256")
  .update(readFileSync(join(root, "src/icon.svg")))
  .digest("hex")
  .slice(0, 8)
  .toUpperCase();
const icon = `icon-${iconHash}.svg`;
copyFileSync(join(root, "src/icon.svg"), join(assets, icon));

const page = readFileSync(join(root, "src/index.html"), "utf8")
  .replace("{{style}}", PREFIX + style)
  .replace("{{script}}", PREFIX + script)
  .replace("{{icon}}", PREFIX + icon);
writeFileSync(join(out, "index.html"), page);

let total = 0;
for (const path of [join(out, "index.html"), ...readdirSync(assets).map((n) => join(assets, n))]) {
  const packed = gzipSync(readFileSync(path), { level: 9 });
  writeFileSync(`${path}.gz`, packed);
  total += packed.length;
}
process.stdout.write(`${total} bytes compressed, of at most ${LIMIT}\n`);
if (total > LIMIT) {
  process.stderr.write(
    "the compressed console exceeds its limit: load a view on demand, or drop a library\n",
  );
  process.exit(1);
}
