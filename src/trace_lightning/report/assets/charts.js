"use strict";
/* The curves of the page: SVG drawn from the JSON in #data, redrawn when the window's width or a switch changes.

   spec = {title, unit, log, stacked, curves: [{label, x, y, pale, color}], bounds: [{value, kind, label}]}

   A logarithmic axis has no zero, and a mismatch of exactly zero is the best there is: zeros lie on the axis' floor. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const STATE = new URLSearchParams(location.hash.slice(1)); // what a reload of the page must not lose
const remember = (key, value) => {
  if (value === "" || value === null) STATE.delete(key); else STATE.set(key, value);
  history.replaceState(null, "", "#" + STATE);
};

function make(tag, attributes = {}, parent = null, text = null) {
  const svg = /^(svg|path|line|text|circle|g)$/.test(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  return String(Number(value.toPrecision(4)));
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => power * factor >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(i * step + 0); // not -0
  return ticks;
}

function linearScale(values, height, top) {
  let low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 && low < margin * 8 ? 0 : low - margin, high + margin];
  return { at: value => top + height * (1 - (value - low) / (high - low)), ticks: linearTicks(low, high, 4) };
}

function logScale(values, height, top) {
  const positive = values.filter(value => value > 0);
  const hasZeros = positive.length < values.length;
  const low = Math.floor(Math.log10(Math.min(...positive)) - (hasZeros ? 0.7 : 0)), high = Math.log10(Math.max(...positive)) + 0.15;
  const at = value => top + height * (value > 0 ? 1 - (Math.log10(value) - low) / (high - low) : 1);
  const step = Math.max(1, Math.ceil((high - low) / 5)), ticks = hasZeros ? [0] : [];
  for (let power = low + (hasZeros ? step : 0); power <= high; power += step) ticks.push(10 ** power);
  return { at, ticks };
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function stackedUp(curves) {
  const base = new Map(); // by step: a phase may not be measured in every step
  return curves.map(curve => {
    const below = curve.x.map(x => base.get(x) || 0), tops = curve.y.map((y, i) => y + below[i]);
    curve.x.forEach((x, i) => base.set(x, tops[i]));
    return { ...curve, below, tops };
  });
}

class Chart {
  constructor(spec, host, id) {
    Object.assign(this, { spec, id, hidden: new Set() });
    const negative = spec.curves.some(curve => curve.y.some(value => value < 0));
    this.log = STATE.has(id) ? STATE.get(id) === "log" : spec.log;
    this.figure = make("figure", {}, host);
    const caption = make("figcaption", {}, this.figure);
    make("b", {}, caption, spec.title);
    make("i", {}, caption, spec.unit);
    if (!negative && !spec.stacked) {
      const button = make("button", { class: "scale", title: "switch between a linear and a logarithmic axis" }, caption);
      const label = () => { button.textContent = this.log ? "log" : "linear"; };
      button.onclick = () => { this.log = !this.log; remember(id, this.log ? "log" : "linear"); label(); this.draw(); };
      label();
    }
    this.svg = make("svg", {}, this.figure);
    this.legend();
    this.tip = make("div", { class: "tip", hidden: "" }, this.figure);
    this.svg.onpointermove = this.svg.onpointerdown = event => this.point(event);
    this.svg.onpointerleave = () => { this.tip.hidden = true; this.overlay.replaceChildren(); };
    this.draw();
  }

  legend() {
    const legend = make("div", { class: "legend" }, this.figure);
    this.spec.curves.forEach((curve, i) => {
      if (curve.pale) return;
      const button = make("button", {}, legend);
      make("s", { style: `background:var(--c${curve.color % 8})` }, button);
      button.append(curve.label);
      button.onclick = () => {
        this.hidden.has(i) ? this.hidden.delete(i) : this.hidden.add(i);
        button.classList.toggle("off");
        this.draw();
      };
    });
  }

  draw() {
    const width = Math.max(240, this.figure.clientWidth - 18), height = 210, left = 46, right = 8, top = 14, bottom = 20;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const seen = this.spec.curves.filter((_, i) => !this.hidden.has(i));
    this.curves = this.spec.stacked ? stackedUp(seen) : seen.map(curve => ({ ...curve, tops: curve.y }));
    const xs = this.curves.flatMap(curve => [curve.x[0], curve.x.at(-1)]), values = this.curves.flatMap(curve => curve.tops);
    if (!values.length) return;
    const bounds = this.spec.bounds, inner = height - top - bottom;
    const log = this.log && (bounds.length > 0 || values.some(value => value > 0));
    const scale = log ? logScale([...values, ...bounds.map(bound => bound.value)], inner, top)
      : linearScale(this.spec.stacked ? [0, ...values] : values, inner, top);
    const first = Math.min(...xs), span = Math.max(...xs) - first || 1;
    this.x = step => left + (width - left - right) * (step - first) / span;
    this.step = x => first + span * (x - left) / (width - left - right);
    this.y = scale.at;
    for (const tick of scale.ticks) {
      const y = scale.at(tick);
      make("line", { class: "axis", x1: left, x2: width - right, y1: y, y2: y }, this.svg);
      make("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, this.svg, short(tick));
    }
    for (const tick of linearTicks(first, first + span, 5).filter(Number.isInteger))
      make("text", { x: this.x(tick), y: height - 5, "text-anchor": "middle" }, this.svg, tick.toLocaleString("en"));
    this.curves.forEach(curve => this.curve(curve));
    for (const bound of bounds) {
      const y = scale.at(bound.value);
      if (y < top || y > top + inner) continue;
      make("line", { class: `bound ${bound.kind}`, x1: left, x2: width - right, y1: y, y2: y }, this.svg);
      const place = bound.kind === "warn" ? { x: width - right, "text-anchor": "end" } : { x: left + 4 }; // apart where close
      make("text", { class: bound.kind, y: y - 3, ...place }, this.svg, `${bound.kind}: ${bound.label}`);
    }
    this.overlay = make("g", {}, this.svg);
  }

  curve(curve) {
    const color = `var(--c${curve.color % 8})`, at = (values, i) => `${this.x(curve.x[i]).toFixed(1)},${this.y(values[i]).toFixed(1)}`;
    const line = "M" + curve.x.map((_, i) => at(curve.tops, i)).join("L");
    if (this.spec.stacked) {
      const back = curve.x.map((_, i) => at(curve.below, curve.x.length - 1 - i).replace(/^[^,]+/, this.x(curve.x[curve.x.length - 1 - i]).toFixed(1)));
      make("path", { d: `${line}L${back.join("L")}Z`, fill: color, opacity: 0.8 }, this.svg);
      return;
    }
    const kind = `curve${curve.pale ? " pale" : ""}${curve.x.length > 300 ? " dense" : ""}`;
    make("path", { d: line, class: kind, stroke: color }, this.svg);
    if (curve.x.length <= 30)
      curve.x.forEach((x, i) => make("circle", { cx: this.x(x), cy: this.y(curve.tops[i]), r: 2.2, fill: color }, this.svg));
  }

  point(event) {
    if (!this.overlay) return;
    const box = this.svg.getBoundingClientRect(), wanted = this.step((event.clientX - box.left) * this.svg.viewBox.baseVal.width / box.width);
    const found = this.curves.map(curve => ({ curve, i: nearest(curve.x, wanted) }));
    if (!found.length) return;
    const closest = found.reduce((a, b) => Math.abs(a.curve.x[a.i] - wanted) <= Math.abs(b.curve.x[b.i] - wanted) ? a : b);
    const step = closest.curve.x[closest.i];
    this.overlay.replaceChildren();
    make("line", { class: "cursor", x1: this.x(step), x2: this.x(step), y1: 8, y2: 190 }, this.overlay);
    this.tip.replaceChildren();
    make("b", {}, this.tip, `step ${step.toLocaleString("en")}`);
    for (const { curve, i } of found) {
      make("circle", { cx: this.x(curve.x[i]), cy: this.y(curve.tops[i]), r: 3.5, fill: `var(--c${curve.color % 8})` }, this.overlay);
      const where = curve.x[i] === step ? "" : ` (step ${curve.x[i].toLocaleString("en")})`;
      make("div", {}, this.tip, `${curve.label}: ${short(curve.y[i])}${where}`);
    }
    this.tip.hidden = false;
    const room = this.figure.clientWidth - this.tip.offsetWidth - 8, x = this.x(step) * box.width / this.svg.viewBox.baseVal.width;
    this.tip.style.left = `${Math.max(4, Math.min(room, x > room / 2 ? x - this.tip.offsetWidth - 4 : x + 20))}px`;
    this.tip.style.top = `${this.svg.offsetTop + 4}px`;
  }
}

const CHARTS = DATA.charts.map((spec, i) => new Chart(spec, document.getElementById("charts"), `c${i}`));
const MORE = document.getElementById("more");
MORE.hidden = !DATA.others.length;
function drawOthers() {
  if (MORE.open && !MORE.drawn)
    CHARTS.push(...DATA.others.map((spec, i) => new Chart(spec, document.getElementById("others"), `o${i}`)));
  MORE.drawn = MORE.drawn || MORE.open;
}
MORE.ontoggle = () => { remember("more", MORE.open ? 1 : ""); drawOthers(); };
MORE.open = STATE.has("more");
drawOthers();
let redraw = 0;
addEventListener("resize", () => { cancelAnimationFrame(redraw); redraw = requestAnimationFrame(() => CHARTS.forEach(chart => chart.draw())); });
