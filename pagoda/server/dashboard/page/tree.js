// The radix tree as an icicle. A row divides the one above it; widths go by blocks, shades by hits.
//
//   [acme                                ]
//   [You are a helpful ...  ][Translate  ]
//   [What is ...][Why ...   ]

import { byId, count, element, tell, tenantName } from "./format.js";

const ROW = 28;
const MAX_ROWS = 12;
const NARROW = 3;
const HINT = "Widths go by blocks, shades by hits; an orange edge is held by a request or lease.";
const SHADES = [1, 4, 16, 64]; // hits from which a darker shade begins
const box = byId("tree");
let current = 0; // the one node that Tab reaches
let nodes = [];

export function drawTree(runs, admin) {
  nodes = layOut(grow(runs));
  const height = Math.max(...nodes.map((node) => node.row + 1), 0) * ROW;
  box.style.height = `${height}px`;
  while (box.children.length > nodes.length) box.lastChild.remove();
  while (box.children.length < nodes.length) box.append(element("button"));
  current = Math.min(current, Math.max(0, nodes.length - 1));
  nodes.forEach((node, index) => fill(box.children[index], node, index, admin));
  const looked = box.querySelector(":hover") ?? document.activeElement;
  const seen = nodes[[...box.children].indexOf(looked)]; // anew each time: what it was may be gone, and its text with it
  if (!nodes.length) tell("run", "Nothing is cached yet.");
  else tell("run", seen ? describe(seen) : `${HINT}${admin ? "" : " The admin key shows their texts."}`);
}

// Runs come parents first: a scope's runs follow each other, each with its level.
function grow(runs) {
  const scopes = new Map();
  let path = [];
  for (const run of runs) {
    const key = JSON.stringify([run.tenant, run.cache_salt, run.adapter]);
    if (!scopes.has(key)) scopes.set(key, { scope: run, children: [], own: 0 });
    path = path.slice(0, run.level);
    const parent = path.at(-1) ?? scopes.get(key);
    const node = { run, parent, children: [], own: run.num_blocks };
    parent.children.push(node);
    path.push(node);
  }
  const roots = [...scopes.values()];
  const weigh = (node) => (node.weight = node.own + node.children.reduce((sum, child) => sum + weigh(child), 0));
  roots.forEach(weigh);
  return roots;
}

function layOut(roots) {
  const placed = [];
  const place = (siblings, left, width, row) => {
    const total = siblings.reduce((sum, node) => sum + node.weight, 0);
    for (const node of siblings) {
      const own = total ? (width * node.weight) / total : 0;
      if ((own * box.clientWidth) / 100 >= NARROW) {
        placed.push(Object.assign(node, { left, width: own, row }));
        if (row + 1 < MAX_ROWS) place(node.children, left, own, row + 1);
      }
      left += own;
    }
  };
  place(roots, 0, 100, 0);
  return placed;
}

function fill(button, node, index, admin) {
  const { run } = node;
  const shade = run ? SHADES.filter((hits) => run.num_hits >= hits).length : 0;
  button.className = run ? `h${shade}${run.num_held ? " held" : ""}` : "scope";
  if ((node.width * box.clientWidth) / 100 < 24) button.classList.add("narrow");
  button.style.left = `${node.left}%`;
  button.style.width = `${node.width}%`;
  button.style.top = `${node.row * ROW}px`;
  const text = run ? runText(run, admin) : scopeText(node.scope);
  if (button.textContent !== text) button.textContent = text;
  button.setAttribute("role", "treeitem");
  button.setAttribute("aria-level", node.row + 1);
  button.setAttribute("aria-label", describe(node));
  button.tabIndex = index === current ? 0 : -1;
}

const quoted = (text) => JSON.stringify(text).slice(1, -1);

function runText(run, admin) {
  const hits = run.num_hits ? `${count(run.num_hits)}× ` : "";
  return hits + (admin ? quoted(run.preview) : `${count(run.num_tokens)} tokens`);
}

function scopeText(scope) {
  const parts = [tenantName(scope.tenant)];
  if (scope.cache_salt) parts.push(`salt ${scope.cache_salt}`);
  if (scope.adapter) parts.push(`adapter ${scope.adapter}`);
  return parts.join(", ");
}

function describe(node) {
  const { run } = node;
  if (!run) return `${scopeText(node.scope)}: ${count(node.weight)} blocks shown`;
  const parts = [
    `${count(run.num_tokens)} tokens after ${count(run.start)}`,
    `${count(run.num_blocks)} blocks`,
    `${count(run.num_hits)} hits`,
  ];
  if (run.num_held) parts.push(`${count(run.num_held)} blocks held`);
  return parts.join(", ") + (run.preview === undefined ? "" : `: ${quoted(run.preview)}`);
}

function tellRun(event) {
  const index = [...box.children].indexOf(event.target);
  if (index >= 0) tell("run", describe(nodes[index]));
}

function move(event) {
  const here = nodes[current];
  if (!here) return;
  const level = nodes.filter((node) => node.row === here.row);
  const at = level.indexOf(here);
  const goal = {
    ArrowRight: level[at + 1],
    ArrowLeft: level[at - 1],
    ArrowDown: here.children.find((child) => nodes.includes(child)),
    ArrowUp: here.parent,
    Home: nodes[0],
    End: nodes.at(-1),
  }[event.key];
  if (goal === undefined) return;
  event.preventDefault();
  box.children[current].tabIndex = -1;
  current = nodes.indexOf(goal);
  box.children[current].tabIndex = 0;
  box.children[current].focus();
}

export function watchTree(redraw) {
  for (const kind of ["pointerover", "focusin", "click"]) box.addEventListener(kind, tellRun);
  box.addEventListener("focusin", (event) => (current = Math.max(0, [...box.children].indexOf(event.target))));
  box.addEventListener("keydown", move);
  let width = box.clientWidth;
  new ResizeObserver(() => {
    if (box.clientWidth !== width) {
      width = box.clientWidth;
      redraw();
    }
  }).observe(box);
}
