// The pool as a map of cells: by use, or by tenant.

import { byId, count, element, percent, tell, tenantName } from "./format.js";

const USES = {
  ".": ["free", "--free"],
  c: ["cached", "--cached"],
  p: ["private", "--private"],
  s: ["shared", "--shared"],
  l: ["leased", "--leased"],
  o: ["others'", "--others"],
};
const MAX_HEIGHT = 264;
const HINT = "Point at a cell to see what it is.";
const canvas = byId("map");
let shown = null;
let grid = null;

const colourBy = () => document.querySelector("input[name=colour]:checked").value;
const ownerVariable = (map, owner) => (map.tenants[owner] === null ? "--others" : `--t${owner}`);

export function drawMap(map, pool) {
  shown = map;
  draw();
  const counts = map.counts;
  const words = ["free", "cached", "private", "shared", "leased"].map((name) => `${count(counts[name])} ${name}`);
  canvas.setAttribute("aria-label", `${count(pool.total)} blocks: ${words.join(", ")}`);
  fillLegend(map, pool);
}

function draw() {
  const width = canvas.clientWidth;
  if (!shown || !width) return;
  const cells = shown.uses.length;
  let pitch = 24;
  while (pitch > 4 && Math.ceil(cells / Math.floor(width / pitch)) * pitch > MAX_HEIGHT) pitch -= 1;
  const columns = Math.max(1, Math.floor(width / pitch));
  pitch = width / columns;
  const height = Math.ceil(cells / columns) * pitch;
  grid = { columns, pitch };
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colours = {};
  const colour = (variable) => (colours[variable] ??= style.getPropertyValue(variable));
  const byTenant = colourBy() === "tenant";
  const side = Math.floor(pitch) - (pitch > 6 ? 2 : 1);
  for (let cell = 0; cell < cells; cell += 1) {
    const x = Math.round((cell % columns) * pitch);
    const y = Math.round(Math.floor(cell / columns) * pitch);
    const use = shown.uses[cell];
    const full = use === "." ? 0 : shown.filled ? shown.filled[cell] / 100 : 1;
    context.fillStyle = colour("--free");
    context.fillRect(x, y, side, side);
    if (full) {
      context.fillStyle = colour(byTenant ? ownerVariable(shown, shown.owners[cell]) : USES[use][1]);
      const part = Math.max(1, Math.round(side * full));
      context.fillRect(x, y + side - part, side, part);
    }
  }
}

function fillLegend(map, pool) {
  let entries;
  if (colourBy() === "tenant") {
    const present = map.tenants.map((name, owner) => [name, owner]).filter(([, owner]) => map.owners.includes(String(owner)));
    entries = present.map(([name, owner]) => [ownerVariable(map, owner), tenantName(name)]);
    entries.push(["--free", `free ${count(pool.free)}`]);
  } else {
    const hidden = map.uses.includes("o");
    entries = ["free", "cached", "private", "shared", "leased"].map((name) => [
      `--${name}`,
      `${name} ${count(map.counts[name])} (${percent(map.counts[name], pool.total)})`,
    ]);
    if (hidden) entries.push(["--others", "of others, whatever for"]);
  }
  byId("legend").replaceChildren(
    ...entries.map(([variable, text]) => {
      const item = element("li");
      const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      swatch.style.background = `var(${variable})`;
      swatch.setAttribute("aria-hidden", "true");
      item.append(swatch, text);
      return item;
    }),
  );
}

function tellCell(event) {
  if (!shown || !grid) return;
  const column = Math.floor(event.offsetX / grid.pitch);
  const cell = Math.floor(event.offsetY / grid.pitch) * grid.columns + column;
  if (column >= grid.columns || cell >= shown.uses.length) return;
  const first = cell * shown.blocks_per_cell;
  const range = shown.blocks_per_cell === 1 ? `Block ${count(first)}` : `Blocks from ${count(first)}`;
  const use = USES[shown.uses[cell]][0];
  const owner = use === "free" || use === "others'" ? "" : `, ${tenantName(shown.tenants[shown.owners[cell]])}`;
  const full = shown.filled && use !== "free" ? `, ${shown.filled[cell]}% in use` : "";
  tell("cell", `${range}: ${shown.blocks_per_cell === 1 ? "" : "mostly "}${use}${owner}${full}`);
}

export function watchMap(redraw) {
  canvas.addEventListener("pointermove", tellCell);
  canvas.addEventListener("pointerdown", tellCell);
  canvas.addEventListener("pointerleave", () => tell("cell", HINT));
  tell("cell", HINT);
  for (const input of document.querySelectorAll("input[name=colour]")) input.addEventListener("change", redraw);
  new ResizeObserver(draw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
