// What a page does by itself: it refreshes its tables, draws its charts, and keeps colours as they were chosen.
"use strict";

const REFRESH_MS = 2000;
const SOON_MS = 150;
const LONGEST_MS = 30000;
// Okabe and Ito's colours; patterns tell bars apart without any.
const KINDS = {
  "data": ["#e69f00", ""], "forward": ["#0072b2", ""], "backward": ["#56b4e9", "/"], "communication": ["#d55e00", "x"],
  "bubble": ["#f0e442", "."], "optimizer": ["#009e73", ""], "checkpoint": ["#cc79a7", "-"], "evaluation": ["#8c8c8c", "+"],
  "other": ["#bdbdbd", ""], "step": ["#d9d9d9", ""],
  "parameters": ["#0072b2", ""], "buffers": ["#f0e442", "."], "gradients": ["#56b4e9", "/"],
  "optimizer state": ["#009e73", ""], "rest": ["#bdbdbd", ""],
};
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#b8a800"];
const FROM_ZERO = ["seconds of a step", "memory of rank 0, MiB", "samples per second", "weight per second", "MiB sent by rank 0"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash"];

let plotly = null;
const drawn = []; // functions that draw the page's charts again, in other colours

function loadPlotly() {
  if (!plotly) {
    plotly = new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = "/static/plotly.js";
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => reject(new Error("plotly.js could not be loaded"));
      document.head.append(script);
    });
  }
  return plotly;
}

// plotly reads some HTML in texts; names are shown as they are.
function asText(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function layout(more) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, exponentformat: "e" };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--text"), size: 12 },
    margin: { l: 50, r: 10, t: 10, b: 35 }, hovermode: "x unified", showlegend: false,
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--text") } },
  };
  const both = Object.assign(base, more);
  both.xaxis = Object.assign({}, axis, more.xaxis);
  both.yaxis = Object.assign({}, axis, more.yaxis);
  return both;
}

const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

async function draw(element, traces, more) {
  const library = await loadPlotly();
  // What somebody has zoomed to stays while new values come.
  more.uirevision = "kept";
  await library.react(element, traces, layout(more), CONFIG);
}

async function fetchJson(address) {
  const response = await fetch(address, { credentials: "same-origin" });
  if (!response.ok) throw new Error(`the run is gone, or the server has failed (${response.status})`);
  return response.json();
}

// Say once, above a chart, what it does not show.
function note(element, text) {
  if (element.previousElementSibling && element.previousElementSibling.className === "note") return;
  const paragraph = document.createElement("p");
  paragraph.className = "note";
  paragraph.textContent = text;
  element.before(paragraph);
}

// ---- curves

function tracesOf(curve, number, name) {
  const line = { color: LINES[number % LINES.length], dash: DASHES[number % DASHES.length], width: 1.7 };
  const mode = curve.step.length < 60 ? "lines+markers" : "lines";
  const traces = [];
  if (curve.low) {
    const band = { x: curve.step, type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 0 }, showlegend: false };
    traces.push({ ...band, y: curve.low });
    traces.push({ ...band, y: curve.high, fill: "tonexty", fillcolor: line.color + "33" });
  }
  traces.push({ x: curve.step, y: curve.mean, type: "scatter", mode, name: asText(name), line, marker: { size: 4 } });
  return traces;
}

// All finite values that curves draw.
function valuesOf(curves) {
  return curves.flatMap((curve) => [curve.mean, curve.low || [], curve.high || []]).flat().filter((value) => value !== null);
}

// plotly draws a constant in the middle of two units, where a small one looks like 0: half of it to either side shows it.
function rangeOf(name, curves) {
  const values = valuesOf(curves);
  const low = values.reduce((one, other) => Math.min(one, other), Infinity);
  const high = values.reduce((one, other) => Math.max(one, other), -Infinity);
  const around = Math.abs(low) / 2 || 1;
  const isFromZero = FROM_ZERO.includes(name);
  if (low === high) return { autorange: false, range: [isFromZero ? 0 : low - around, low + around] };
  return { autorange: true, rangemode: isFromZero ? "tozero" : "normal" };
}

// On a logarithm the values have no place that are 0 or less.
function onLogarithm(curve) {
  const above = (values) => values.map((value) => (value > 0 ? value : null));
  const least = valuesOf([curve]).reduce((one, other) => (other > 0 ? Math.min(one, other) : one), Infinity);
  const shown = { ...curve, mean: above(curve.mean) };
  // The band goes down to the least value that there is where its lower bound has no place.
  if (curve.low) Object.assign(shown, { low: curve.low.map((value) => (value === null ? null : Math.max(value, least))), high: above(curve.high) });
  return shown;
}

function figureFor(holder, name, redraw) {
  for (const figure of holder.children) {
    if (figure.dataset.name === name) return figure;
  }
  const figure = document.createElement("figure");
  figure.dataset.name = name;
  const caption = document.createElement("figcaption");
  const title = document.createElement("span");
  title.textContent = name;
  const label = document.createElement("label");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.setAttribute("aria-label", `${name} on a logarithmic axis`);
  box.addEventListener("change", redraw);
  label.append(box, " logarithmic");
  caption.append(title, label);
  const chart = document.createElement("div");
  chart.className = "chart";
  chart.setAttribute("aria-hidden", "true");
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "numbers";
  summary.setAttribute("aria-label", `numbers of ${name}`);
  details.append(summary, document.createElement("div"));
  details.addEventListener("toggle", () => figure.fillTable && figure.fillTable());
  figure.append(caption, chart, details);
  holder.append(figure);
  return figure;
}

function cell(row, tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  row.append(element);
}

function showNumbers(figure, curves) {
  figure.fillTable = () => {
    const details = figure.querySelector("details");
    if (!details.open) return;
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    cell(head, "th", "step");
    for (const curve of curves) cell(head, "th", curve.run || "value");
    const rows = new Map();
    curves.forEach((curve, column) => curve.step.forEach((step, at) => {
      if (!rows.has(step)) rows.set(step, new Array(curves.length).fill("-"));
      const value = curve.mean[at];
      rows.get(step)[column] = value === null ? "-" : String(Number(value.toPrecision(5)));
    }));
    for (const [step, values] of [...rows].sort((one, other) => one[0] - other[0])) {
      const row = table.insertRow();
      cell(row, "th", step);
      for (const value of values) cell(row, "td", value);
    }
    details.querySelector("div").replaceChildren(table);
  };
  figure.fillTable();
}

// Say beside a chart's name what it can't show.
function sayNotShown(figure, curves, isLogarithmic) {
  const notFinite = curves.reduce((sum, curve) => sum + curve.not_finite, 0);
  const notAbove = curves.flatMap((curve) => curve.mean).filter((value) => value !== null && value <= 0).length;
  const left = [];
  if (notFinite) left.push(`${notFinite} are NaN or infinite`);
  if (isLogarithmic && notAbove) left.push(`${notAbove} points are 0 or less and not shown`);
  figure.querySelector("figcaption span").textContent = left.length ? `${figure.dataset.name} (${left.join("; ")})` : figure.dataset.name;
}

async function drawCurves(holder, address, toFigures) {
  let isAgain = false;
  let data = null;
  const redraw = async () => {
    if (!data) return;
    for (const { name, curves } of toFigures(data)) {
      const figure = figureFor(holder, name, redraw);
      const box = figure.querySelector("figcaption input");
      box.disabled = !valuesOf(curves).some((value) => value > 0);
      const isLogarithmic = box.checked && !box.disabled;
      const drawnCurves = isLogarithmic ? curves.map(onLogarithm) : curves;
      const traces = drawnCurves.flatMap((curve) => tracesOf(curve, curve.number || 0, curve.run || name));
      sayNotShown(figure, curves, isLogarithmic);
      showNumbers(figure, curves);
      const legend = curves[0].run ? { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, margin: { l: 50, r: 10, t: 30, b: 35 } } : {};
      const yaxis = isLogarithmic ? { type: "log", autorange: true } : { type: "linear", ...rangeOf(name, curves) };
      yaxis.uirevision = yaxis.type; // a zoom is kept, but not from one kind of axis to the other
      await draw(figure.querySelector(".chart"), traces, { ...legend, xaxis: { title: { text: "step" } }, yaxis });
    }
    holder.dataset.isDrawn = data.is_complete ? "all" : "some";
  };
  drawn.push(redraw);
  return async () => {
    const separator = address.includes("?") ? "&" : "?";
    data = await fetchJson(isAgain ? `${address}${separator}again=1` : address);
    isAgain = !data.is_complete;
    await redraw();
    if (data.is_cut) note(holder, "The loop has logged more names than have a chart here.");
    if (!data.is_complete) say(`${Math.floor(100 * data.share)} % of the events are read`);
    return data.is_complete ? REFRESH_MS : SOON_MS;
  };
}

// ---- bars

function drawBars(element) {
  const unit = element.dataset.bars;
  const redraw = async () => {
    const data = JSON.parse(document.getElementById(`${element.id}-data`).textContent);
    const ranks = data.ranks.map((rank) => `rank ${rank}`);
    const traces = data.kinds.map((kind) => {
      const [fill, shape] = KINDS[kind.name] || ["#bdbdbd", ""];
      return {
        type: "bar", orientation: "h", name: kind.name, y: ranks, x: kind[unit], hovertemplate: `%{x:.2f} ${unit === "ms" ? "ms" : "MiB"}`,
        marker: { color: fill, pattern: { shape, fillmode: "overlay", fgcolor: "#222222", size: 6, solidity: 0.2 }, line: { width: 0.5, color: "#444444" } },
      };
    });
    element.style.height = `${Math.min(60, 8 + 2.2 * Math.max(ranks.length, 2))}rem`;
    await draw(element, traces, {
      barmode: "stack", hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
      margin: { l: 60, r: 10, t: 40, b: 40 }, yaxis: { autorange: "reversed", type: "category" },
      xaxis: { title: { text: unit === "ms" ? "milliseconds of a step" : "MiB" } },
    });
    element.dataset.isDrawn = "all";
  };
  drawn.push(redraw);
  return redraw;
}

// ---- timeline

async function drawSpans(element) {
  const data = await fetchJson(element.dataset.spans);
  const redraw = async () => {
    const traces = Object.entries(data.kinds).map(([kind, bars]) => {
      const [fill, shape] = KINDS[kind] || KINDS[kind.split(" ")[0]] || ["#bdbdbd", ""];
      return {
        type: "bar", orientation: "h", name: asText(kind), y: bars.row.map(asText), base: bars.begin, x: bars.length,
        customdata: bars.name.map(asText), hovertemplate: "%{customdata}: %{x:.3f} ms, from %{base:.3f}",
        marker: { color: fill, pattern: { shape, fillmode: "overlay", fgcolor: "#222222", size: 5, solidity: 0.2 }, line: { width: 0.5, color: "#444444" } },
      };
    });
    element.style.height = `${Math.min(90, 10 + 1.8 * data.rows.length)}rem`;
    await draw(element, traces, {
      barmode: "overlay", hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      margin: { l: 190, r: 10, t: 40, b: 40 },
      yaxis: { type: "category", categoryorder: "array", categoryarray: data.rows.map(asText), autorange: "reversed" },
      xaxis: { title: { text: `ms since step ${data.steps[0]} began` } },
    });
    if (data.is_cut) note(element, "These are too many: only the earliest 4,000 bars are drawn. Show fewer steps.");
    element.dataset.isDrawn = "all";
  };
  drawn.push(redraw);
  await redraw();
}

// ---- tables that refresh

let tag = "";
const content = new Map(); // of each region that refreshes, as the server has sent it

function say(text) {
  document.getElementById("fresh").textContent = text;
}

function replaceLive(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const focused = document.activeElement;
  for (const before of document.querySelectorAll(".live")) {
    const after = page.getElementById(before.id);
    if (!after || after.innerHTML === content.get(before.id)) continue;
    const chosen = new Set([...before.querySelectorAll("input:checked")].map((input) => input.value));
    const isWithin = before.contains(focused) ? keyOf(focused) : null;
    const scrolled = [...before.querySelectorAll("pre")].map((each) => [each.scrollTop, each.scrollTop + each.clientHeight >= each.scrollHeight - 4]);
    const opened = new Map([...before.querySelectorAll("details")].map((each) => [each.innerText.split("\n")[0], each.open]));
    content.set(before.id, after.innerHTML);
    before.innerHTML = after.innerHTML;
    for (const each of before.querySelectorAll("details")) {
      const title = each.querySelector("summary").innerText.split("\n")[0];
      if (opened.has(title)) each.open = opened.get(title);
    }
    for (const input of before.querySelectorAll("input[type=checkbox]")) input.checked = chosen.has(input.value);
    before.querySelectorAll("pre").forEach((each, at) => {
      if (scrolled[at]) each.scrollTop = scrolled[at][1] ? each.scrollHeight : scrolled[at][0];
    });
    if (isWithin) {
      const same = [...before.querySelectorAll("a, input, button, summary, pre")].find((each) => keyOf(each) === isWithin);
      if (same) same.focus();
    }
  }
}

function keyOf(element) {
  return [element.tagName, element.getAttribute("href"), element.getAttribute("value"), element.id].join("|");
}

async function refreshTables() {
  const response = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {}, credentials: "same-origin", cache: "no-store" });
  if (response.status === 401) throw new Error("the server wants its token: open the address that it printed");
  if (response.status === 304) return false;
  if (!response.ok) throw new Error(`the page is gone (${response.status})`);
  tag = response.headers.get("ETag") || "";
  replaceLive(await response.text());
  return true;
}

// ---- all of a page

async function every(action, first) {
  let wait = first;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    if (document.hidden) {
      wait = REFRESH_MS;
      continue;
    }
    try {
      wait = (await action()) || REFRESH_MS;
      say("");
    } catch (error) {
      wait = Math.min(2 * Math.max(wait, REFRESH_MS), LONGEST_MS);
      say(error instanceof TypeError ? "the server does not answer" : error.message);
    }
  }
}

function chooseTheme() {
  const select = document.getElementById("theme");
  if (!select) return;
  const set = (name) => {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    drawn.forEach((redraw) => redraw());
  };
  select.value = localStorage.getItem("theme") || "";
  set(select.value);
  select.addEventListener("change", () => {
    localStorage.setItem("theme", select.value);
    set(select.value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set(select.value));
}

function keys() {
  document.addEventListener("keydown", (event) => {
    const find = document.getElementById("find");
    const isTyping = event.target.matches("input, select, textarea");
    if (event.key === "/" && find && !isTyping) {
      event.preventDefault();
      find.focus();
    }
    const tabs = [...document.querySelectorAll(".tabs a")];
    const number = Number(event.key);
    if (!isTyping && !event.ctrlKey && !event.metaKey && !event.altKey && number >= 1 && number <= tabs.length) tabs[number - 1].click();
  });
}

async function begin() {
  chooseTheme();
  keys();
  for (const each of document.querySelectorAll(".live")) content.set(each.id, each.innerHTML);
  for (const each of document.querySelectorAll("#output pre")) each.scrollTop = each.scrollHeight; // the newest lines
  for (const select of document.querySelectorAll(".filter select")) {
    select.addEventListener("change", () => select.form.submit());
  }
  const ask = document.getElementById("ask");
  if (ask) {
    ask.addEventListener("submit", () => {
      document.getElementById("ask-button").disabled = true;
      say("asking the ranks");
    });
  }
  const bars = [...document.querySelectorAll("[data-bars]")].map(drawBars);
  const actions = [];
  const curves = document.querySelector("[data-curves]");
  if (curves) {
    const toFigures = (data) => data.curves.map((curve) => ({ name: curve.name, curves: [curve] }));
    actions.push(await drawCurves(curves, curves.dataset.curves, toFigures));
  }
  const compare = document.querySelector("[data-compare]");
  if (compare) {
    const toFigures = (data) => data.charts.map((chart) => ({ name: chart.name, curves: chart.runs }));
    actions.push(await drawCurves(compare, compare.dataset.compare, toFigures));
  }
  for (const action of actions) every(action, 0);
  const spans = document.querySelector("[data-spans]");
  if (spans) drawSpans(spans).catch((error) => say(error.message));
  for (const redraw of bars) redraw();
  if (document.querySelector(".live") && !document.getElementById("answer")) {
    every(async () => {
      if (await refreshTables()) for (const redraw of bars) await redraw();
      return REFRESH_MS;
    }, REFRESH_MS);
  }
}

document.addEventListener("DOMContentLoaded", begin);
