// Numbers as people read them, and small helpers for the page.

export const byId = (id) => document.getElementById(id);

// Live regions are read out when they change: what is there already must not be written again.
export function tell(id, text) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
}

export function count(value) {
  return value.toLocaleString("en");
}

export function short(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return (value / (unit === "k" ? 1e3 : size)).toPrecision(3) + unit;
  }
  return value >= 100 ? Math.round(value).toString() : String(Math.round(value * 10) / 10);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

export function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return share > 0 && share < 0.5 ? "<1%" : `${Math.round(share)}%`;
}

export function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function tenantName(name) {
  return name === null ? "others" : name || "all requests";
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A bar that is filled to a share of it. Widths go through CSSOM: the page's policy allows no style attributes.
export function bar(share) {
  const made = element("div", "bar");
  const fill = element("span", "fill");
  fill.style.width = `${100 * Math.min(1, share)}%`;
  made.append(fill);
  made.setAttribute("aria-hidden", "true");
  return made;
}
