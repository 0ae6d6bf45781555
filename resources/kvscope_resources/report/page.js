"use strict";
// Zoom and hover of the report's charts, and its table of requests. Text from the recording is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";
const ROWS_AT_ONCE = 100;
const HINT =
  "Drag in a chart to zoom, double-click to show everything. In a selected chart, the keys are: arrows, +, − and Escape.";

function start() {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const charts = new ReportCharts(data);
  if (data.requests) new RequestTable(document.getElementById("request-table"), data.requests, charts);
}

function element(tag, attributes, parent, text) {
  const made = document.createElement(tag);
  for (const name of Object.keys(attributes)) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function shape(tag, attributes, parent) {
  const made = document.createElementNS(SVG, tag);
  for (const name of Object.keys(attributes)) made.setAttribute(name, attributes[name]);
  parent.append(made);
  return made;
}

// All charts with a time axis. They show the same time range and the same cursor.
class ReportCharts {
  constructor(data) {
    this.data = data;
    this.plot = data.plot;
    this.view = data.axis;
    this.cursor = null;
    this.charts = Array.from(document.querySelectorAll("svg[data-time]"), (svg) => this.connect(svg));
    this.bar = element("div", { class: "zoom", hidden: "" }, document.body);
    this.range = element("span", { "aria-live": "polite" }, this.bar);
    element("button", { type: "button" }, this.bar, "Show everything").addEventListener("click", () => this.reset());
    if (this.charts.length) document.querySelector("main > p").after(element("p", { class: "soft" }, null, HINT));
    this.tip = element("div", { class: "tip", hidden: "", role: "status" }, document.body);
  }

  connect(svg) {
    const series = this.data.charts[svg.dataset.time];
    const chart = { svg, series, curves: svg.querySelector(".curves"), timed: svg.querySelectorAll("[data-t]") };
    chart.ticks = svg.querySelector(".ticks");
    chart.saved = { ticks: Array.from(chart.ticks.childNodes), curves: chart.curves && Array.from(chart.curves.childNodes) };
    chart.height = svg.viewBox.baseVal.height;
    const bottom = chart.height - this.plot.bottom;
    chart.selection = shape("rect", { class: "selection", y: this.plot.top, height: bottom - this.plot.top, width: 0 }, svg);
    chart.line = shape("line", { class: "cursor", y1: this.plot.top, y2: bottom, visibility: "hidden" }, svg);
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointerdown", (event) => this.press(chart, event));
    svg.addEventListener("pointermove", (event) => this.move(chart, event));
    svg.addEventListener("pointerup", (event) => this.release(chart, event));
    svg.addEventListener("pointercancel", () => this.stopDrag(chart));
    svg.addEventListener("pointerleave", () => this.hover(null, null));
    svg.addEventListener("dblclick", () => this.reset());
    svg.addEventListener("keydown", (event) => this.key(chart, event));
    svg.addEventListener("blur", () => this.hover(null, null));
    return chart;
  }

  x(time) {
    const { left, width } = this.plot;
    return left + (width * (time - this.view.from)) / (this.view.until - this.view.from);
  }

  time(chart, event) {
    const box = chart.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) * chart.svg.viewBox.baseVal.width) / box.width;
    const share = Math.max(0, Math.min((x - this.plot.left) / this.plot.width, 1));
    return this.view.from + share * (this.view.until - this.view.from);
  }

  press(chart, event) {
    if (event.button !== 0) return;
    chart.dragFrom = this.time(chart, event);
    chart.svg.setPointerCapture(event.pointerId);
  }

  move(chart, event) {
    const time = this.time(chart, event);
    if (chart.dragFrom !== undefined) {
      const edges = [this.x(chart.dragFrom), this.x(time)].sort((a, b) => a - b);
      chart.selection.setAttribute("x", edges[0]);
      chart.selection.setAttribute("width", edges[1] - edges[0]);
    }
    this.hover(chart, time, event.clientX, event.clientY);
  }

  release(chart, event) {
    const from = chart.dragFrom;
    this.stopDrag(chart);
    if (from === undefined) return;
    const until = this.time(chart, event);
    if (Math.abs(this.x(until) - this.x(from)) > 5) this.zoom(from, until);
  }

  stopDrag(chart) {
    chart.dragFrom = undefined;
    chart.selection.setAttribute("width", 0);
  }

  key(chart, event) {
    const length = this.view.until - this.view.from;
    const middle = this.cursor === null ? (this.view.from + this.view.until) / 2 : this.cursor;
    const actions = {
      ArrowLeft: () => this.step(chart, middle, -1),
      ArrowRight: () => this.step(chart, middle, 1),
      "+": () => this.zoom(middle - length / 4, middle + length / 4),
      "-": () => this.zoom(middle - length, middle + length),
      Escape: () => this.reset(),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  step(chart, from, direction) {
    const times = this.data.times;
    const index = nearestIndex(times, from) + (this.cursor === null ? 0 : direction);
    if (index < 0 || index >= times.length) return;
    const box = chart.svg.getBoundingClientRect();
    const time = times[index];
    if (time < this.view.from || time > this.view.until) {
      const length = this.view.until - this.view.from;
      this.zoom(time - length / 2, time + length / 2);
    }
    const x = box.left + (this.x(time) * box.width) / chart.svg.viewBox.baseVal.width;
    this.hover(chart, time, x, box.top + box.height / 2);
  }

  hover(chart, time, clientX, clientY) {
    this.cursor = time;
    for (const each of this.charts) {
      each.line.setAttribute("visibility", time === null ? "hidden" : "visible");
      if (time === null) continue;
      each.line.setAttribute("x1", this.x(time));
      each.line.setAttribute("x2", this.x(time));
    }
    this.tip.hidden = time === null;
    if (time === null) return;
    const index = nearestIndex(this.data.times, time);
    const isRecorded = index >= 0 && Math.abs(this.data.times[index] - time) <= this.data.gap;
    this.tip.textContent = "";
    element("b", {}, this.tip, `${valueText(isRecorded && chart.series ? this.data.times[index] : time)} s`);
    for (const line of chart.series ? chart.series.lines : []) {
      const row = element("div", { class: `key ${line.css}` }, this.tip);
      element("i", {}, row);
      row.append(`${line.name}: ${isRecorded ? valueText(line.values[index]) + chart.series.unit : "–"}`);
    }
    const box = this.tip.getBoundingClientRect();
    const left = clientX + 14 + box.width > window.innerWidth ? clientX - 14 - box.width : clientX + 14;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${Math.max(0, Math.min(clientY + 14, window.innerHeight - box.height))}px`;
  }

  zoom(from, until) {
    const full = this.data.axis;
    this.view = limitedView(from, until, full, Math.min(1, full.until - full.from));
    if (this.view.until - this.view.from >= full.until - full.from) {
      this.reset();
      return;
    }
    for (const chart of this.charts) this.draw(chart);
    this.range.textContent = `${valueText(this.view.from)} s to ${valueText(this.view.until)} s`;
    this.bar.hidden = false;
  }

  reset() {
    this.view = this.data.axis;
    this.bar.hidden = true;
    for (const chart of this.charts) {
      chart.ticks.replaceChildren(...chart.saved.ticks);
      if (chart.curves) chart.curves.replaceChildren(...chart.saved.curves);
      for (const each of chart.timed) this.place(each);
    }
  }

  draw(chart) {
    const { top, bottom } = this.plot;
    const floor = chart.height - bottom;
    chart.ticks.textContent = "";
    for (const tick of roundTicks(this.view.from, this.view.until, 8)) {
      const x = this.x(tick).toFixed(1);
      shape("line", { class: "grid", x1: x, x2: x, y1: top, y2: floor }, chart.ticks);
      const label = shape("text", { class: "label mid", x, y: chart.height - 6 }, chart.ticks);
      label.textContent = `${valueText(tick)} s`;
    }
    for (const each of chart.timed) this.place(each);
    if (chart.curves && chart.series) this.drawCurves(chart, floor);
  }

  drawCurves(chart, floor) {
    const { times, gap } = this.data;
    const height = floor - this.plot.top;
    const y = (value) => this.plot.top + height * (1 - Math.min(value / chart.series.top, 1));
    chart.curves.textContent = "";
    for (const line of chart.series.lines) {
      for (const run of curveRuns(times, line.values, this.view.from, this.view.until, gap)) {
        const points = run.map(([time, value]) => `${this.x(time).toFixed(1)},${y(value).toFixed(1)}`);
        if (line.area) {
          const ends = [run[0], run[run.length - 1]].map(([time]) => `${this.x(time).toFixed(1)},${floor}`);
          shape("polygon", { class: `area ${line.css}`, points: [ends[0], ...points, ends[1]].join(" ") }, chart.curves);
        } else if (run.length === 1) {
          const at = points[0].split(",");
          shape("circle", { class: `bar ${line.css}`, cx: at[0], cy: at[1], r: 2.2 }, chart.curves);
        } else {
          shape("polyline", { class: `curve ${line.css}`, points: points.join(" ") }, chart.curves);
        }
      }
    }
  }

  // Moves an element with the attribute data-t (start and end in seconds) to its place in the current view.
  place(timed) {
    const [from, until] = timed.dataset.t.split(",").map(Number);
    timed.style.display = until < this.view.from || from > this.view.until ? "none" : "";
    const start = this.x(Math.max(from, this.view.from));
    const end = this.x(Math.min(until, this.view.until));
    if (timed.tagName === "image") {
      timed.setAttribute("x", this.x(from) - this.plot.left);
      timed.setAttribute("width", this.x(until) - this.x(from));
      return;
    }
    for (const part of timed.tagName === "g" ? timed.children : [timed]) {
      if (part.tagName === "rect") {
        part.setAttribute("x", start);
        part.setAttribute("width", Math.max(end - start, 0.8));
      } else if (part.tagName === "line") {
        part.setAttribute("x1", this.x(from));
        part.setAttribute("x2", this.x(from));
      } else if (part.tagName === "path") {
        part.setAttribute("transform", `translate(${this.x(from) - Number(part.dataset.x)} 0)`);
      }
    }
  }
}

// Table of requests, with a filter and sorted by a column.
class RequestTable {
  constructor(place, requests, charts) {
    Object.assign(this, { columns: requests.columns, charts, numShown: ROWS_AT_ONCE, sortKey: "number", isDescending: false });
    place.parentElement.hidden = false;
    const numRows = this.columns[0].values.length;
    if (numRows < requests.num_all) {
      const note = `The ${numRows.toLocaleString("en-US")} requests with the longest total time of ${requests.num_all.toLocaleString("en-US")}.`;
      element("p", { class: "soft" }, place, note);
    }
    const controls = element("p", {}, place);
    const label = element("label", {}, controls, "Filter ");
    this.filter = element("input", { type: "search", placeholder: "preemptions>0 first>1.5 finished" }, label);
    this.count = element("span", { class: "soft", role: "status" }, controls);
    const table = element("table", {}, place);
    this.head = element("tr", {}, element("thead", {}, table));
    this.body = element("tbody", {}, table);
    this.more = element("button", { type: "button" }, place, "Show more");
    this.more.addEventListener("click", () => this.show(this.numShown + 5 * ROWS_AT_ONCE));
    this.filter.addEventListener("input", () => this.update());
    for (const column of this.columns) {
      column.head = element("th", { class: column.kind === "text" ? "words" : "number", title: `${column.tip}. In the filter: ${column.key}` }, this.head);
      const button = element("button", { type: "button" }, column.head, column.title);
      button.addEventListener("click", () => this.sortBy(column));
    }
    this.update();
  }

  sortBy(column) {
    this.isDescending = column.key === this.sortKey ? !this.isDescending : column.kind !== "text";
    this.sortKey = column.key;
    this.update();
  }

  update() {
    const column = this.columns.find((each) => each.key === this.sortKey);
    for (const each of this.columns) each.head.removeAttribute("aria-sort");
    column.head.setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
    this.rows = sortedRows(filteredRows(this.columns, this.filter.value), column, this.isDescending);
    this.show(ROWS_AT_ONCE);
  }

  show(numShown) {
    this.numShown = Math.min(numShown, this.rows.length);
    this.count.textContent = ` ${this.numShown.toLocaleString("en-US")} of ${this.rows.length.toLocaleString("en-US")} shown`;
    this.more.hidden = this.numShown === this.rows.length;
    this.body.replaceChildren(...this.rows.slice(0, this.numShown).map((row) => this.line(row)));
  }

  line(row) {
    const line = element("tr", {});
    for (const column of this.columns) {
      const cell = element("td", { class: column.kind === "text" ? "words" : "number" }, line);
      const text = numberText(column.values[row], column.kind);
      if (column.key === "number") {
        const button = element("button", { type: "button", title: "Show its time in the charts" }, cell, `#${text}`);
        button.addEventListener("click", () => this.zoomTo(row));
      } else {
        cell.textContent = text;
      }
    }
    return line;
  }

  zoomTo(row) {
    const value = (key) => this.columns.find((each) => each.key === key).values[row];
    const from = value("arrival");
    const length = value("total") === null ? this.charts.data.axis.until - from : value("total");
    this.charts.zoom(from - length / 20, from + length * 1.05);
    if (this.charts.charts.length) this.charts.charts[0].svg.scrollIntoView({ block: "center" });
  }
}

start();
