// Two grids with a row for each fragment, on canvas: versions and contributors over the whole run, and the latest rounds
// with why each wait ended. A pointer or the arrow keys choose a cell, and a line below says in words what it is.

import { byId, clock, colour, counted, fixed, isNumber, lasting, made, percent, put } from "./words.js";

const ROW = { few: 18, many: 11 }; // pixels
const LEFT = 34;
const RIGHT = 46;
const AXIS = 22;
const ROUNDS_SHOWN = 90;
const GAP_SHARE = 0.25; // of a row

const WHY = {
  "all in": { paint: "accent", words: "everybody it could expect was in" },
  "grace over": { paint: "warn", words: "the grace window was over" },
  "no grace": { paint: "sky", words: "the quorum was in and there was no grace window" },
  "the rest cannot make it": { paint: "bad", words: "the rest could not have made it in time" },
  "everyone is leaving": { paint: "muted", words: "everyone was leaving" },
  "the last work": { paint: "ink", words: "it was the last work of the run" },
};
const chosen = { map: null, rounds: null };

export function drawMap(record) {
  const map = record.history?.map ?? [];
  const canvas = byId("map");
  const span = Math.max(1, record.history?.t ?? 1);
  const most = Math.max(1, ...map.flatMap((row) => row.contributors.filter(isNumber)));
  const grid = begun(canvas, map.length, span, Math.min(...map.map((row) => row.t[0] ?? span), span - 1));
  if (!grid) return;
  const cells = [];
  map.forEach((row, fragment) => {
    row.t.forEach((t, i) => {
      const end = row.t[i + 1] ?? Math.min(span, t + Math.max(row.width_s, span / 60));
      const share = (row.contributors[i] ?? 0) / most;
      const cell = { fragment, from: t, to: Math.max(end, t), version: row.version[i], contributors: row.contributors[i] };
      cells.push(cell);
      grid.bar(cell, "accent", 0.14 + 0.86 * share);
    });
    grid.note(fragment, row.version.length ? `v${row.version.at(-1)}` : "");
  });
  grid.finish();
  choosing(canvas, "map", cells, grid, (cell) =>
    `Fragment ${cell.fragment} at ${clock(cell.from)}: version ${cell.version}` +
    (isNumber(cell.contributors) ? `, ${fixed(cell.contributors, 1)} contributors` : ", taken from an earlier version"));
}

export function drawRounds(record) {
  const rounds = (record.history?.rounds ?? []).slice(-ROUNDS_SHOWN);
  const canvas = byId("rounds");
  const from = rounds.length ? Math.min(...rounds.map((each) => each.opened)) : 0;
  const to = rounds.length ? Math.max(...rounds.map((each) => each.committed)) : 1;
  const grid = begun(canvas, record.status?.versions?.length ?? 0, to, from);
  legend(record.history?.closes ?? {});
  if (!grid) return;
  const cells = rounds.map((each) => ({ ...each, from: each.opened, to: each.closed }));
  for (const cell of cells) {
    grid.bar(cell, WHY[cell.why]?.paint ?? "muted", 1);
    grid.tail(cell);
  }
  grid.finish();
  choosing(canvas, "rounds", cells, grid, (cell) =>
    `Fragment ${cell.fragment}, version ${cell.version}, opened at ${clock(cell.opened)}: waited ${lasting(cell.closed - cell.opened)} until ` +
    `${WHY[cell.why]?.words ?? cell.why}; ${counted(cell.contributors, "learner")} in it of ${cell.ready} ready, quorum ${cell.quorum}, ` +
    `on disk ${lasting(cell.committed - cell.closed)} later`);
}

function legend(closes) {
  const list = byId("rounds-legend");
  const total = Object.values(closes).reduce((a, b) => a + b, 0);
  const key = JSON.stringify(closes);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const rows = Object.entries(closes).sort((a, b) => b[1] - a[1]);
  list.replaceChildren(...rows.map(([why, n]) =>
    made("li", { class: `why ${WHY[why]?.paint ?? "muted"}` }, made("i"), `${WHY[why]?.words ?? why}: ${n} (${percent(n / total)})`)));
}

function begun(canvas, rows, to, from) {
  canvas.dataset.empty = rows ? "" : "nothing yet";
  const height = rows > 12 ? ROW.many : ROW.few;
  const size = { width: canvas.parentElement.clientWidth - padding(canvas.parentElement), height: rows * height + AXIS };
  if (size.width <= 0) return null;
  const scale = window.devicePixelRatio || 1;
  const isSame = canvas.width === Math.round(size.width * scale) && canvas.height === Math.round(size.height * scale);
  if (!isSame) {
    canvas.width = Math.round(size.width * scale);
    canvas.height = Math.round(size.height * scale);
    canvas.style.height = `${size.height}px`;
  }
  if (!rows) return null;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, size.width, size.height);
  const x = (t) => LEFT + ((t - from) / Math.max(1e-9, to - from)) * (size.width - LEFT - RIGHT);
  const paints = Object.fromEntries(["accent", "warn", "bad", "sky", "muted", "ink", "hairline"].map((name) => [name, colour(name)]));
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const box = (cell) => {
    const gap = height * GAP_SHARE;
    return { left: x(cell.from), top: cell.fragment * height + gap / 2, width: Math.max(3, x(cell.to) - x(cell.from) - 0.5), height: height - gap };
  };
  return {
    rows, height, box,
    bar(cell, paint, alpha) {
      const at = box(cell);
      pen.globalAlpha = alpha;
      pen.fillStyle = paints[paint];
      pen.fillRect(at.left, at.top, at.width, at.height);
      pen.globalAlpha = 1;
    },
    tail(cell) {
      pen.fillStyle = paints.hairline;
      const at = box({ ...cell, from: cell.closed, to: cell.committed });
      pen.fillRect(at.left, at.top + at.height / 2 - 1, at.width, 2);
    },
    note(row, text) {
      pen.fillStyle = paints.muted;
      pen.textAlign = "left";
      pen.fillText(text, size.width - RIGHT + 6, (row + 0.5) * height);
    },
    ring(cell) {
      const at = box(cell);
      pen.strokeStyle = paints.ink;
      pen.lineWidth = 2;
      pen.strokeRect(at.left - 1, at.top - 1, at.width + 2, at.height + 2);
    },
    finish() {
      pen.fillStyle = paints.muted;
      pen.textAlign = "right";
      for (let row = 0; row < rows; row += rows > 12 ? 4 : 1) pen.fillText(String(row), LEFT - 10, (row + 0.5) * height);
      const ticks = Math.max(2, Math.min(8, Math.floor(size.width / 110)));
      for (let i = 0; i <= ticks; i++) {
        pen.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
        const t = from + (i / ticks) * (to - from);
        pen.fillText(to - from < 8 ? `${t.toFixed(1)} s` : clock(t), x(t), rows * height + AXIS / 2 + 3);
      }
    },
  };
}

function padding(element) {
  const style = getComputedStyle(element);
  return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
}

// One cell is chosen, by its fragment and when it began; it stays chosen while the grid grows.
function choosing(canvas, name, cells, grid, words) {
  const read = byId(`${name}-read`);
  const state = (canvas.choice ??= {});
  Object.assign(state, { cells, grid, words });
  const tell = () => {
    const at = chosen[name];
    const cell = at && state.cells.find((each) => each.fragment === at.fragment && each.from === at.from);
    put(read, cell ? state.words(cell) : state.cells.length ? "Point at a cell, or use the arrow keys, to read it." : "");
    if (cell) state.grid.ring(cell);
  };
  tell();
  if (state.isBound) return;
  state.isBound = true;
  const choose = (cell) => {
    if (!cell) return;
    chosen[name] = { fragment: cell.fragment, from: cell.from };
    canvas.dispatchEvent(new CustomEvent("chosen", { bubbles: true }));
    tell();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const fragment = Math.floor((event.clientY - box.top) / state.grid.height);
    const x = event.clientX - box.left;
    choose(nearest(state.cells.filter((each) => each.fragment === fragment), (each) => {
      const at = state.grid.box(each);
      return Math.max(at.left - x, x - at.left - at.width, 0);
    }));
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves) || !state.cells.length) return;
    event.preventDefault();
    const at = chosen[name] ?? { fragment: 0, from: Number.MAX_SAFE_INTEGER };
    const [rows, columns] = moves[event.key];
    const fragment = Math.min(state.grid.rows - 1, Math.max(0, at.fragment + rows));
    const row = state.cells.filter((each) => each.fragment === fragment).sort((a, b) => a.from - b.from);
    const here = nearest(row, (each) => Math.abs(each.from - at.from));
    choose(row[Math.min(row.length - 1, Math.max(0, row.indexOf(here) + columns))]);
  });
}

function nearest(list, far) {
  let best = null;
  for (const each of list) if (best === null || far(each) < far(best)) best = each;
  return best;
}
