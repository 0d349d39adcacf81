// Numbers as people write them, and small helpers that put text on the page. Text only: nothing here makes markup.

const group = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const whole = (n) => (isNumber(n) ? group.format(n) : "–");
export const compact = (n) => (isNumber(n) ? short.format(n) : "–");
export const isNumber = (n) => typeof n === "number" && Number.isFinite(n);
export const percent = (share, digits = 0) => (isNumber(share) ? `${(100 * share).toFixed(digits)} %` : "–");
export const fixed = (n, digits) => (isNumber(n) ? n.toFixed(digits) : "–");
export const counted = (n, thing) => `${whole(n)} ${thing}${n === 1 ? "" : "s"}`;

export function size(n) {
  if (!isNumber(n)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 999.5) return `${Number(n.toPrecision(3))} ${unit}`;
    n /= 1000;
  }
  return `${Number(n.toPrecision(4))} TB`;
}

export function lasting(s) {
  if (!isNumber(s)) return "–";
  if (s < 0.9995) return `${Math.round(1000 * s)} ms`;
  if (s < 59.5) return s < 9.95 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`;
  if (s < 3570) return `${Math.round(s / 60)} min`;
  return s < 48 * 3600 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} d`;
}

// A moment of the run: 1:05, 2:03:20, 3d 04:00
export function clock(t) {
  if (!isNumber(t)) return "–";
  const s = Math.max(0, Math.floor(t));
  const two = (n) => String(n).padStart(2, "0");
  if (s < 3600) return `${Math.floor(s / 60)}:${two(s % 60)}`;
  if (s < 48 * 3600) return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  return `${Math.floor(s / 86400)}d ${two(Math.floor(s / 3600) % 24)}:${two(Math.floor(s / 60) % 60)}`;
}

export const byId = (id) => document.getElementById(id);

// Puts text there if it is not there yet, so that a page at rest costs nothing.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function drawn(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
