"use strict";
// Logic of the report's charts and table, without access to the page.

const COMPARISON = /^([a-z]+)(<=|>=|<|>|=)(-?[0-9.]+)$/;

// Returns the index of the value in the ascending list `times` that is nearest to `time`; -1 if the list is empty.
function nearestIndex(times, time) {
  let low = 0;
  let high = times.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle;
    else high = middle;
  }
  return Math.abs(times[low] - time) <= Math.abs(times[high] - time) ? low : high;
}

// Returns round times between `from` and `until`, about `count`.
function roundTicks(from, until, count) {
  const rough = (until - from) / count;
  if (!(rough > 0)) return [];
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((nice) => nice * power).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(from / step - 1e-9); index * step <= until + 1e-9 * step; index++) ticks.push(index * step);
  return ticks;
}

// Returns the view with the limits exchanged if necessary, inside of `full`, and at least `minimum` long.
function limitedView(from, until, full, minimum) {
  let low = Math.min(from, until);
  let high = Math.max(from, until);
  const length = Math.min(Math.max(high - low, minimum), full.until - full.from);
  const middle = (low + high) / 2;
  low = Math.max(full.from, Math.min(middle - length / 2, full.until - length));
  high = low + length;
  return { from: low, until: high };
}

// Splits the points of a curve between `from` and `until` into lists of consecutive ones. Unknown values (null) and
// gaps longer than `gap` separate the lists. A point is [time, value]; points on both ends of the view are interpolated.
function curveRuns(times, values, from, until, gap) {
  const runs = [];
  let last = -Infinity;
  for (let index = 0; index < times.length; index++) {
    const isNear = times[Math.min(index + 1, times.length - 1)] >= from && times[Math.max(index - 1, 0)] <= until;
    if (!isNear || values[index] === null) {
      last = -Infinity;
      continue;
    }
    if (times[index] - last > gap) runs.push([]);
    runs[runs.length - 1].push([times[index], values[index]]);
    last = times[index];
  }
  return runs.map((run) => clippedRun(run, from, until)).filter((run) => run.length);
}

function clippedRun(run, from, until) {
  const inside = run.filter(([time]) => time >= from && time <= until);
  const after = run.findIndex(([time]) => time >= from);
  if (after > 0) inside.unshift(pointAt(run[after - 1], run[after], from));
  const beyond = run.findIndex(([time]) => time > until);
  if (beyond > 0) inside.push(pointAt(run[beyond - 1], run[beyond], until));
  return inside;
}

function pointAt(a, b, time) {
  return [time, a[1] + ((b[1] - a[1]) * (time - a[0])) / (b[0] - a[0])];
}

// Returns the indices of the rows that match all words of `text`. A word such as `preemptions>0` compares the number
// of a column by its key; any other word must occur in one of the row's texts.
function filteredRows(columns, text) {
  const numRows = columns.length ? columns[0].values.length : 0;
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => wordTest(columns, word));
  const rows = [];
  for (let row = 0; row < numRows; row++) if (tests.every((test) => test(row))) rows.push(row);
  return rows;
}

function wordTest(columns, word) {
  const parts = COMPARISON.exec(word);
  const column = parts && columns.find((each) => each.key === parts[1] && each.kind !== "text");
  if (column) {
    const limit = Number(parts[3]);
    const compare = {
      "<": (value) => value < limit,
      ">": (value) => value > limit,
      "<=": (value) => value <= limit,
      ">=": (value) => value >= limit,
      "=": (value) => value === limit,
    }[parts[2]];
    return (row) => column.values[row] !== null && compare(column.values[row]);
  }
  const texts = columns.filter((each) => each.kind === "text");
  return (row) => texts.some((each) => each.values[row].toLowerCase().includes(word));
}

// Sorts rows by a column; unknown values come last in either direction. Equal rows keep their order.
function sortedRows(rows, column, isDescending) {
  const sign = isDescending ? -1 : 1;
  return rows.slice().sort((a, b) => {
    const x = column.values[a];
    const y = column.values[b];
    if (x === y) return a - b;
    if (x === null) return 1;
    if (y === null) return -1;
    return sign * (x < y ? -1 : 1);
  });
}

function numberText(value, kind) {
  if (value === null) return "–";
  if (kind === "text") return value;
  return kind === "seconds" ? value.toFixed(3) : value.toLocaleString("en-US");
}

// Returns a value of a chart with up to four digits.
function valueText(value) {
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(4)));
}
