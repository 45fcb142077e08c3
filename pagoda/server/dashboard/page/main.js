// Asks the server every two seconds and shows what it says. Rates are differences between two answers.

import { drawMap, watchMap } from "./blocks.js";
import { bar, byId, bytes, count, element, percent, seconds, short, tell, tenantName } from "./format.js";
import { drawTree, watchTree } from "./tree.js";

const EVERY_MS = 2000;
const SLOWEST_MS = 10000;
const KEPT = 150; // answers: five minutes
const LEAST_SHOWN = 30; // answers that a line has room for
const RECENT_MS = 60000;
const LEVELS = ["Calm", "Smaller batches", "Evicting ahead", "Compressing", "Holding", "Preempting"];
const REASONS = {
  evicted: "evicted",
  lease_expired: "lease ran out, then evicted",
  restore_failed: "a tier failed to give it",
  restore_slower: "computing was faster than a tier",
  partial_block: "less than a block",
  other_scope: "cached in another scope",
  diverged: "the prompt goes on differently",
  never_seen: "never seen before",
};
let history = [];
let failures = 0;
let timer = 0;
let asked = 0;

async function poll() {
  clearTimeout(timer);
  const mine = (asked += 1);
  const key = sessionStorage.getItem("key");
  try {
    const headers = key ? { "x-admin-key": key, "x-api-key": key } : {};
    const answer = await fetch("v1/kv/overview", { headers, cache: "no-store" });
    const state = await answer.json();
    if (mine !== asked) return; // the key was changed meanwhile
    if (answer.status === 401 || answer.status === 403) {
      say(key ? "The server does not know this key" : "The server asks for a key", "lost");
      byId("access").open = true;
      byId("main").hidden = true;
      history = [];
    } else if (!answer.ok) {
      throw new Error(`status ${answer.status}`);
    } else {
      take(state);
      failures = 0;
    }
  } catch {
    if (mine !== asked) return;
    failures += 1;
    say("No answer, trying again", "lost");
    byId("main").classList.add("stale");
  }
  if (!document.hidden) timer = setTimeout(poll, Math.min(SLOWEST_MS, EVERY_MS * 2 ** Math.max(0, failures - 1)));
}

function say(text, className) {
  tell("status", text);
  byId("status").className = className;
}

function take(state) {
  if (history.length && history.at(-1).state.server.started !== state.server.started) history = [];
  history.push({ at: performance.now(), state });
  if (history.length > KEPT) history.shift();
  byId("main").classList.remove("stale");
  byId("main").hidden = false;
  say(state.viewer === "admin" ? "Live, everything shown" : "Live", "live");
  show();
}

function show() {
  if (!history.length) return;
  const { state } = history.at(-1);
  byId("model").textContent = `${state.server.model}, Pagoda ${state.server.version}`;
  showHits(state);
  showTtft(state.ttft);
  showPressure(state);
  showRequests(state);
  drawMap(state.map, state.pool);
  drawTree(state.tree, state.viewer === "admin");
  showTiers(state);
  showMisses(state.misses);
  showTenants(state.tenants);
}

// The answer of a minute ago, or the oldest there is.
function before() {
  const now = history.at(-1).at;
  return history.find((each) => now - each.at <= RECENT_MS);
}

function showHits({ requests }) {
  const old = before().state.requests;
  const asked = requests.query_tokens - old.query_tokens;
  byId("hit-rate").textContent = percent(requests.hit_tokens, requests.query_tokens);
  byId("hit-note").textContent = asked
    ? `${percent(requests.hit_tokens - old.hit_tokens, asked)} in the last minute`
    : `of ${short(requests.query_tokens)} prompt tokens since the start`;
  const answers = history.map(({ state }) => state.requests).filter((each) => each.query_tokens);
  spark("hit-spark", answers.map((each) => each.hit_tokens / each.query_tokens), 1);
}

function showTtft(ttft) {
  for (const kind of ["cold", "warm"]) {
    byId(`${kind}-p50`).textContent = seconds(ttft[kind].p50_s);
    byId(`${kind}-p95`).textContent = seconds(ttft[kind].p95_s);
  }
  byId("ttft-note").textContent = `of ${ttft.cold.count} cold and ${ttft.warm.count} warm requests`;
}

function showPressure({ pool, pressure, requests }) {
  const big = byId("pressure");
  big.textContent = LEVELS[pressure.level];
  big.classList.toggle("tight", pressure.level >= 4);
  const refused = Object.values(pressure.refused).reduce((sum, each) => sum + each, 0);
  byId("pressure-note").textContent =
    `level ${pressure.level} of 5; ${percent(pool.held, pool.total)} of ${count(pool.total)} blocks held, ` +
    `${percent(pool.cached, pool.total)} cached; ${count(requests.preemptions)} preemptions, ${count(refused)} refused`;
  const [heldBar, cachedBar] = byId("pressure-bar").children;
  heldBar.style.width = `${(100 * pool.held) / pool.total}%`;
  cachedBar.style.width = `${(100 * pool.cached) / pool.total}%`;
}

function showRequests({ pool, requests }) {
  byId("running").textContent = count(pool.running);
  byId("requests-note").textContent = `running; ${count(pool.waiting)} waiting, ${count(requests.finished)} finished`;
  const running = history.map(({ state }) => state.pool.running + state.pool.waiting);
  spark("running-spark", running, Math.max(1, ...running));
}

function spark(id, values, top) {
  const step = 100 / Math.max(LEAST_SHOWN, values.length - 1);
  const start = 100 - step * (values.length - 1);
  const points = values.map((value, index) => `${(start + index * step).toFixed(2)},${(23 - (22 * value) / top).toFixed(2)}`);
  byId(id).firstElementChild.setAttribute("points", points.join(" "));
}

function showTiers(state) {
  const old = before();
  const elapsed = (history.at(-1).at - old.at) / 1000;
  const rows = state.tiers.map((tier) => {
    const then = old.state.tiers.find((each) => each.name === tier.name) ?? tier;
    const rate = (name) => (elapsed ? Math.max(0, tier[name] - then[name]) / elapsed : 0);
    const item = element("li");
    const title = element("div", "title");
    const room = tier.used_bytes === null ? "" : bytes(tier.used_bytes) + (tier.capacity_bytes ? ` of ${bytes(tier.capacity_bytes)}` : "");
    title.append(element("strong", "", tier.name), element("span", tier.state === "ok" ? "note" : "out", tier.state === "ok" ? room : `${tier.state}, ${room}`));
    item.append(title);
    if (tier.capacity_bytes) item.append(bar(tier.used_bytes / tier.capacity_bytes));
    const flows = element("div", "flows");
    flows.append(
      element("span", "", `↓ ${short(rate("written_records"))} records/s`),
      element("span", "", `↑ ${short(rate("restored_tokens"))} tokens/s`),
    );
    const failed = Object.entries(tier.failures).filter(([name]) => name !== "missing").reduce((sum, [, each]) => sum + each, 0);
    const totals = [`${short(tier.written_records)} written`, `${short(tier.restored_tokens)} tokens restored`];
    if (tier.slower_blocks) totals.push(`${short(tier.slower_blocks)} blocks not loaded: slower`);
    if (tier.late_blocks) totals.push(`${short(tier.late_blocks)} loaded in vain`);
    if (tier.skipped_records + tier.lost_records) totals.push(`${short(tier.skipped_records + tier.lost_records)} not written`);
    if (failed) totals.push(`${short(failed)} failures`);
    item.append(flows, element("p", "note", totals.join(", ")));
    return item;
  });
  const device = element("li");
  const title = element("div", "title");
  title.append(element("strong", "", "device"), element("span", "note", `${count(state.pool.total - state.pool.free)} of ${count(state.pool.total)} blocks`));
  device.append(title, bar((state.pool.total - state.pool.free) / state.pool.total));
  if (!rows.length) device.append(element("p", "note", "No tiers below it."));
  byId("tiers").replaceChildren(device, ...rows);
}

function showMisses(misses) {
  const most = Math.max(1, ...misses.map((each) => each.tokens));
  const rows = misses.map((each) => {
    const item = element("li");
    const title = element("div", "title");
    title.append(element("span", "", REASONS[each.reason] ?? each.reason), element("span", "", `${short(each.tokens)} tokens, ${short(each.requests)} requests`));
    item.append(title, bar(each.tokens / most));
    return item;
  });
  byId("misses").replaceChildren(...(rows.length ? rows : [element("li", "note", "Nothing missed yet.")]));
}

function showTenants(tenants) {
  const rows = tenants.map((each) => {
    const row = element("tr");
    const name = element("th", "", tenantName(each.tenant));
    name.scope = "row";
    const blocks = ["num_held_blocks", "num_cached_blocks", "num_leased_blocks", "num_guaranteed_blocks"];
    const figures = [
      ...blocks.map((field) => count(each[field])),
      percent(each.num_hit_tokens, each.num_query_tokens),
      count(each.num_evicted_blocks),
    ];
    row.append(name, ...figures.map((text) => element("td", "", text)));
    return row;
  });
  byId("tenants").tBodies[0].replaceChildren(...rows);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key").value.trim());
  byId("key").value = "";
  byId("access").open = false;
  history = [];
  poll();
});
document.addEventListener("visibilitychange", () => !document.hidden && poll());
watchMap(show);
watchTree(show);
poll();
