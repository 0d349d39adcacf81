// Figures over time, with uPlot: what was merged of what could have been, loss, who is in a merge, H, bytes a second.
// A series of the record has bins of one width, those in which nothing happened left out; here they are put back.

import { byId, clock, colour, compact, counted, fixed, isNumber, percent, put, size, whole } from "./words.js";

const POINTS_MAX = 64; // of a line: more would be noise
const BIN_S_MIN = 3; // likewise
const LEGEND = 30; // pixels below a chart
const charts = new Map();
let palette = "";

export function drawCharts(record) {
  const history = record.history;
  const series = history?.series;
  const wanted = getComputedStyle(document.documentElement).getPropertyValue("--accent") + document.documentElement.clientWidth;
  if (wanted !== palette) {
    for (const chart of charts.values()) chart.plot?.destroy();
    charts.clear();
    palette = wanted;
  }
  goodput(history, series?.merges);
  loss(history, series?.loss, record.status);
  who(history, series?.merges, record.status);
  every(history, series?.merges, record.status);
  rates(history, series?.traffic);
}

function goodput(history, merges) {
  const bins = dense(merges, history?.t, { tokens: "sum", possible: "mean" }, (i) => ({
    tokens: merges.tokens[i],
    possible: merges.goodput[i] ? merges.tokens[i] / merges.goodput[i] / merges.width_s : null,
  }));
  const done = bins.tokens.map((n) => (n ?? 0) / bins.width);
  let last = null;
  const possible = bins.possible.map((n) => (last = n ?? last)); // as before, where nothing was merged
  const lines = [line("merged", "accent", { fill: "accent-soft", width: 2 }), line("possible", "muted", { dash: [4, 4] })];
  show("goodput", [bins.t, done, possible], lines, { y: compact, from: 0, unit: "tokens/s" });
  put(byId("goodput-now"), isNumber(history?.goodput) ? `${percent(history.goodput, 1)} of what learners could have done is merged` : "");
}

function loss(history, series, status) {
  const bins = dense(series, history?.t, { loss: "mean" }, (i) => ({ loss: series.loss[i] }));
  const curve = (history?.curve ?? []).filter((each) => isNumber(each.figures?.loss));
  const times = [...new Set([...bins.t, ...curve.map((each) => each.t)])].sort((a, b) => a - b);
  const training = new Map(bins.t.map((t, i) => [t, bins.loss[i]]));
  const heldOut = new Map(curve.map((each) => [each.t, each.figures.loss]));
  const lines = [
    line("training", "accent", { width: 2, spanGaps: true }),
    line("held out", "ink", { spanGaps: true, width: 1, dash: [2, 3], points: { show: true, size: 7, fill: colour("ink") } }),
  ];
  const data = [times, times.map((t) => training.get(t) ?? null), times.map((t) => heldOut.get(t) ?? null)];
  show("loss", data, lines, { y: (n) => fixed(n, 2), empty: "no learner has said a loss yet" });
  const newest = bins.loss.findLast(isNumber);
  const said = [];
  if (isNumber(newest)) said.push(`${fixed(newest, 3)} in training`);
  if (isNumber(status?.evaluated?.figures?.loss)) said.push(`${fixed(status.evaluated.figures.loss, 3)} held out`);
  put(byId("loss-now"), said.join(", "));
}

function who(history, merges, status) {
  const bins = dense(merges, history?.t, { contributors: "mean", ready: "mean", quorum: "mean" }, (i) => ({
    contributors: merges.contributors[i], ready: merges.ready[i], quorum: merges.quorum[i],
  }));
  const lines = [
    line("ready", "muted", { spanGaps: true, dash: [4, 4] }),
    line("contributors", "accent", { spanGaps: true, width: 2 }),
    line("quorum", "warn", { spanGaps: true, width: 1.5 }),
  ];
  show("who", [bins.t, bins.ready, bins.contributors, bins.quorum], lines, { y: (n) => String(Math.round(n * 10) / 10), from: 0 });
  const mean = status?.contributors_mean;
  put(byId("who-now"), status?.merges ? `${fixed(mean, 2)} contributors on average` : "");
}

function every(history, merges, status) {
  const bins = dense(merges, history?.t, { asked: "mean", reached: "mean" }, (i) => ({ asked: merges.asked[i], reached: merges.reached[i] }));
  const lines = [
    line("asked", "muted", { spanGaps: true, dash: [4, 4] }),
    line("reached", "accent", { spanGaps: true, width: 2 }),
  ];
  show("every", [bins.t, bins.asked, bins.reached], lines, { y: whole, from: 0 });
  const reached = status?.sync_every_reached ? `, ${fixed(status.sync_every_reached, 1)} reached` : "";
  put(byId("every-now"), status ? `${counted(status.sync_every, "step")} asked${reached}` : "");
}

function rates(history, traffic) {
  const bins = dense(traffic, history?.t, { up: "sum", down: "sum", data_parallel: "sum" }, (i) => ({
    up: traffic.up[i], down: traffic.down[i], data_parallel: traffic.data_parallel[i],
  }));
  const each = (name) => bins[name].map((n) => (n ? n / bins.width : null));
  const lines = [
    line("up", "accent", { spanGaps: true, width: 2 }),
    line("down", "ink", { spanGaps: true }),
    line("data-parallel", "muted", { spanGaps: true, dash: [4, 4] }),
  ];
  show("rates", [bins.t, each("up"), each("down"), each("data_parallel")], lines, { y: (n) => `${size(n)}/s`, log: true });
}

// Bins from first to last, wide enough that there are not too many; the last one, which still fills, is left out.
function dense(series, now, columns, values) {
  const names = Object.keys(columns);
  const found = { t: [], width: 1, ...Object.fromEntries(names.map((name) => [name, []])) };
  if (!series?.t?.length) return found;
  const first = series.t[0];
  const spread = Math.max(1, Math.ceil((series.t.at(-1) - first + series.width_s) / series.width_s / POINTS_MAX));
  const width = Math.max(series.width_s * spread, (series.t.at(-1) - first) / POINTS_MAX, BIN_S_MIN);
  found.width = Math.ceil(width / series.width_s) * series.width_s;
  const count = Math.floor((series.t.at(-1) - first) / found.width) + 1;
  const sums = Array.from({ length: count }, () => ({}));
  series.t.forEach((t, i) => {
    const sum = sums[Math.floor((t - first) / found.width)];
    for (const [name, value] of Object.entries(values(i)))
      if (isNumber(value)) sum[name] = { n: (sum[name]?.n ?? 0) + 1, total: (sum[name]?.total ?? 0) + value };
  });
  const isFilling = count > 3 && first + count * found.width > (now ?? 0);
  if (isFilling) sums.pop();
  sums.forEach((sum, i) => {
    found.t.push(first + (i + 0.5) * found.width);
    for (const name of names) found[name].push(sum[name] ? sum[name].total / (columns[name] === "mean" ? sum[name].n : 1) : null);
  });
  return found;
}

function line(label, paint, more = {}) {
  const { fill, ...rest } = more;
  return { label, stroke: colour(paint), width: 1.5, points: { show: false }, ...(fill ? { fill: colour(fill) } : {}), ...rest };
}

function show(id, data, lines, { y, from, log, empty = "nothing yet" }) {
  const box = byId(id);
  const has = data[0].length > 1 && data.slice(1).some((column) => column.some(isNumber));
  box.dataset.empty = has ? "" : empty;
  if (!has) {
    charts.get(id)?.plot.destroy();
    charts.delete(id);
    return;
  }
  const width = box.clientWidth;
  const height = box.clientHeight - LEGEND;
  let chart = charts.get(id);
  if (!chart) {
    const options = { width, height, series: [{ label: "at", value: (_, t) => (isNumber(t) ? clock(t) : "") }, ...lines.map((each) => ({ ...each, value: (_, n) => (isNumber(n) ? y(n) : "") }))], ...frame(y, from, log) };
    chart = { plot: new window.uPlot(options, data, box) };
    charts.set(id, chart);
    return;
  }
  chart.plot.setData(data);
}

function frame(y, from, log) {
  const grid = { stroke: colour("hairline"), width: 1 };
  const axis = { stroke: colour("muted"), font: "12px system-ui, sans-serif", grid, ticks: { show: false } };
  const range = log ? undefined : (_, low, high) => spanned(from ?? low, high, from);
  return {
    padding: [8, 12, 0, 0],
    cursor: { y: false, points: { size: 7 } },
    legend: { live: true },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map(clock), space: 70, grid: { show: false } },
      { ...axis, values: (_, ticks) => ticks.map((n) => (n === null ? "" : y(n))), size: log ? 76 : 54, space: 34 },
    ],
  };
}

function spanned(low, high, from) {
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [from ?? low - room, high + room];
}
