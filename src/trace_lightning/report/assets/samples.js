"use strict";
/* The sample browser, and the page that loads itself again while its run goes.

   sample = {id, step, split, reward, rewards, reasons, prompt: [{role, text}], turns: [{source, tokens, reward}], ...}
   A token is [text, log-prob under the rollout]; without a log-prob nothing was recorded. Texts are set, never parsed. */

const FILTERS = { split: "", step: "", order: "", low: "", high: "", find: "" };
for (const name in FILTERS) FILTERS[name] = STATE.get(name) || "";

const textOf = sample => sample.turns.map(turn => turn.tokens.map(token => token[0]).join("")).join("\n");
const score = value => typeof value === "number" ? String(Number(value.toPrecision(4))) : "not scored";

function tokenColor(probability) {
  return probability > 0.9 ? "" : probability > 0.5 ? `rgba(var(--halfway),${0.7 * (0.95 - probability)})`
    : `rgba(var(--unlikely),${0.25 + 0.45 * (1 - 2 * probability)})`;
}

function showTurn(name, kind, note, parent) {
  const turn = make("section", { class: `turn ${kind}` }, parent);
  make("b", {}, turn, name + (note ? `, ${note}` : ""));
  return make("div", {}, turn);
}

function showToken([text, logprob], turn, isPolicy) {
  const shown = text.replace(/\n/g, "↵\n");
  if (logprob === null || !isPolicy) return make("span", { class: isPolicy && /^ \[\.\.\. /.test(text) ? "gap" : "" }, turn, shown);
  const token = make("span", { class: shown ? "token" : "token mark" }, turn, shown || "▪");
  token.style.background = tokenColor(Math.exp(logprob));
  token.dataset.tip = `p ${short(Math.exp(logprob))}, log p ${logprob}` + (text ? "" : ", no text of its own (end of text, or part of a character)");
  return token;
}

function showSample(sample) {
  const host = document.getElementById("sample");
  host.replaceChildren();
  if (!sample) return void make("p", { class: "note" }, host, "No sample passes the filters.");
  make("h3", {}, host, `step ${sample.step}, ${sample.split}: reward ${score(sample.reward)}`);
  const facts = [`${sample.num_tokens} tokens`, sample.finish_reason === "length" ? "cut by the length limit" : `ended by ${sample.finish_reason || "?"}`,
    `policy version ${sample.policy_version}`, `line ${sample.id} of completions.jsonl`];
  if (typeof sample.mean_logprob === "number") facts.splice(1, 0, `mean log p ${score(sample.mean_logprob)}`);
  make("div", { class: "note" }, host, facts.join(" · "));
  const rewards = Object.entries(sample.rewards || {}).map(([name, value]) => `${name} ${score(value)}`);
  if (rewards.length) make("div", { class: "note" }, host, "rewards: " + rewards.join(" · "));
  for (const [name, why] of Object.entries(sample.reasons || {})) make("div", { class: "note" }, host, `${name}: ${why}`);
  for (const message of sample.prompt) showTurn(message.role, "given", "", host).textContent = message.text;
  for (const turn of sample.turns) {
    const place = showTurn(turn.source, turn.source, turn.reward === undefined ? "" : `reward ${score(turn.reward)}`, host);
    for (const token of turn.tokens) showToken(token, place, turn.source === "policy");
  }
  if (sample.turns.some(turn => turn.tokens.some(token => token[1] !== null))) {
    const bar = make("div", { class: "scale-bar" }, host, "probability under the rollout:");
    for (const p of [1, 0.75, 0.5, 0.25, 0.01]) {
      make("s", {}, bar).style.background = tokenColor(p);
      bar.append(String(p));
    }
  }
}

function passing() {
  const { split, step, order, low, high, find } = FILTERS, needle = find.toLowerCase();
  const inRange = reward => (low === "" || reward !== null && reward >= +low) && (high === "" || reward !== null && reward <= +high);
  const found = DATA.samples.filter(sample => (!split || sample.split === split) && (!step || sample.step === +step) && inRange(sample.reward)
    && (!needle || (textOf(sample) + sample.prompt.map(message => message.text).join("\n")).toLowerCase().includes(needle)));
  const direction = { best: -1, worst: 1 }[order];
  const key = sample => sample.reward === null ? -direction * Infinity : sample.reward;
  if (order === "late") found.reverse();
  return direction ? found.sort((a, b) => direction * (key(a) - key(b)) || a.id - b.id) : found;
}

function choose(sample) {
  if (sample) remember("sample", sample.id);
  for (const button of document.querySelectorAll("#list button")) button.classList.toggle("chosen", !!sample && button.dataset.id === String(sample.id));
  showSample(sample);
}

function listSamples() {
  const list = document.getElementById("list"), found = passing();
  list.replaceChildren();
  for (const sample of found) {
    const button = make("button", { "data-id": sample.id }, list);
    const line = make("small", {}, button);
    for (const text of [`step ${sample.step}`, sample.split, `reward ${score(sample.reward)}`]) make("span", {}, line, text);
    make("span", {}, button, (sample.prompt.at(-1) || { text: "" }).text.slice(-60) + " → " + textOf(sample).slice(0, 80));
    button.onclick = () => choose(sample);
  }
  document.getElementById("samples-title").textContent = `Samples: ${found.length} of ${DATA.samples.length} on this page`;
  choose(found.find(sample => String(sample.id) === STATE.get("sample")) || found[0]);
  list.scrollTop = (list.querySelector(".chosen")?.offsetTop || 0) - 60; // scrollIntoView would move the page as well
}

function filter(name, element, label) {
  const place = make("label", {}, document.getElementById("filters"), label);
  place.append(element);
  element.value = FILTERS[name];
  element.oninput = () => { FILTERS[name] = element.value; remember(name, element.value); listSamples(); };
}

function select(options) {
  const element = document.createElement("select");
  for (const [value, text] of options) make("option", { value }, element, text);
  return element;
}

if (DATA.samples?.length) {
  const distinct = name => [...new Set(DATA.samples.map(sample => sample[name]))];
  filter("split", select([["", "all"], ...distinct("split").map(name => [name, name])]), "split");
  filter("step", select([["", "all"], ...distinct("step").sort((a, b) => a - b).map(step => [step, step])]), "step");
  filter("order", select([["", "first to last"], ["late", "last to first"], ["best", "best reward first"], ["worst", "worst reward first"]]), "order");
  filter("low", make("input", { type: "number", step: "any" }), "reward from");
  filter("high", make("input", { type: "number", step: "any" }), "to");
  filter("find", make("input", { type: "search" }), "text");
  listSamples();
  const host = document.getElementById("sample"), tip = make("div", { class: "tip", hidden: "" }, document.body);
  host.onpointerover = host.onpointerdown = event => {
    const text = event.target.dataset?.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = event.target.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left + scrollX, scrollX + innerWidth - tip.offsetWidth - 12))}px`;
    tip.style.top = `${box.bottom + scrollY + 4}px`;
  };
  host.onpointerleave = () => { tip.hidden = true; };
}

if (STATE.has("y")) {
  scrollTo(0, +STATE.get("y"));
  remember("y", "");
}
if (DATA.reload) setInterval(() => { // a page in the background, or with text being selected, is left alone
  if (document.hidden || String(getSelection())) return;
  remember("y", Math.round(scrollY));
  location.reload();
}, 1000 * DATA.reload);
