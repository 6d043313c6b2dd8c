// The page: one document about the cluster, updated by the controller's stream and rendered after each change.

import { $, amount, attribute, bar, clock, count, draw, make, ms, p99, row, rows, show, text } from "./dom.js";
import { chart, legend } from "./chart.js";
import { renderLending } from "./lending.js";
import { ask, askToken, change, create, drain, fit, logOut, move, pause, tell, whoAmI } from "./actions.js";

const KEPT_MS = 600_000;
const STATUS = { alive: ["good", "● alive"], joining: ["", "◌ joining"], silent: ["warn", "◌ silent"], lapsed: ["bad", "✕ lapsed"], dead: ["bad", "✕ dead"] };

let cluster = null;      // the document
let chosen = null;       // the selected topic
let points = [];         // its last ten minutes
let generation = null;   // of its events as last read
let due = false;

// The stream.

function merge(target, patch) {
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete target[key];
    else if (typeof value === "object" && !Array.isArray(value)) {
      target[key] = merge(target[key] && typeof target[key] === "object" ? target[key] : {}, value);
    } else target[key] = value;
  }
  return target;
}

let stream = null;
async function listen() {
  stream?.close();
  stream = null;
  let known = false;
  try {
    known = await whoAmI();
  } catch {
    linked("bad", "✕ controller unreachable, retrying");
    setTimeout(listen, 2000);
    return;
  }
  if (known) follow();
  else {
    linked("warn", "◌ log in to see the cluster");
    cluster = null;
    document.body.classList.add("locked");
  }
}

function follow() {
  document.body.classList.remove("locked");
  stream = new EventSource("/v1/watch");
  stream.addEventListener("snapshot", (event) => changed(JSON.parse(event.data)));
  stream.addEventListener("patch", (event) => changed(merge(cluster, JSON.parse(event.data))));
  stream.onopen = () => linked("good", "● live");
  stream.onerror = () => {
    linked("bad", "✕ controller unreachable, retrying");
    if (stream?.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

function linked(kind, words) {
  const badge = $("link").firstElementChild;
  attribute(badge, "class", `badge ${kind}`);
  text(badge, words);
}

function changed(document_) {
  const before = cluster ? statuses : null;
  cluster = document_;
  statuses = Object.fromEntries(Object.values(cluster.brokers).map((each) => [each.name, each.status]));
  if (before) announce(before);
  keepPoint();
  if (!due) {
    due = true;
    requestAnimationFrame(render);
  }
}

let statuses = {};
function announce(before) {
  for (const [name, status] of Object.entries(statuses)) {
    if (before[name] && before[name] !== status && status !== "joining") tell(`Broker ${name} is ${status}.`);
  }
}

// Rendering.

function render() {
  due = false;
  if (!cluster) return;
  const brokers = Object.values(cluster.brokers).sort((a, b) => compare(a.name, b.name));
  const topics = Object.values(cluster.topics).sort((a, b) => compare(a.topic, b.topic));
  renderSummary(brokers, topics);
  renderBrokers(brokers.map((each) => [each.name, each]));
  show($("no-brokers"), !brokers.length);
  renderRefused(Object.entries(cluster.refused ?? {}));
  show($("refused"), Object.keys(cluster.refused ?? {}).length > 0);
  const wanted = $("filter").value.toLowerCase(), only = $("only").checked;
  const matches = topics.filter((each) => each.topic.toLowerCase().includes(wanted) && (!only || each.slo_met === false));
  renderTopics(matches.map((each) => [each.topic, { topic: each, names: brokers.map((broker) => broker.name) }]));
  show($("no-topics"), !topics.length);
  renderDetail();
}

const compare = (a, b) => a.localeCompare(b, "en", { numeric: true });

function renderSummary(brokers, topics) {
  const alive = brokers.filter((each) => each.status === "alive").length;
  const missed = topics.filter((each) => each.slo_met === false).length;
  const met = topics.filter((each) => each.slo_met === true).length;
  text($("sum-brokers"), `${alive} of ${brokers.length} alive`);
  text($("sum-topics"), count(topics.length));
  text($("sum-slo"), missed ? `${missed} not met` : met ? `${met} met` : "–");
  text($("sum-rate"), `${count(brokers.reduce((sum, each) => sum + (each.status === "alive" ? each.rate : 0), 0))}/s`);
  document.title = missed || alive < brokers.length ? `(!) SRTM` : "SRTM";
}

const renderRefused = rows($("refused"), () => {
  const node = make("li");
  return {
    node,
    update(each) {
      const times = each.attempts === 1 ? "once" : `${count(each.attempts)} times`;
      text(node, `Broker ${each.name} from ${each.from} was refused ${times}: ${each.reason}.`);
    },
  };
});

const cell = (kind) => make("td", kind ? { class: kind } : {});

const renderBrokers = rows($("brokers").tBodies[0], (name) => {
  const status = make("span", { class: "badge" }), load = bar(), button = make("button", { type: "button" });
  const rate = cell("n"), mcap = cell("n"), rcap = cell("n"), lag = cell("n");
  const head = make("th", { scope: "row" }, name), where = make("td", { class: "wide" });
  where.append(load.node);
  const state = cell(), tools = cell("n");
  state.append(status);
  tools.append(button);
  const node = row(head, ["Status", state], ["Load", where], ["msg/s", rate], ["mcap", mcap], ["rcap", rcap], ["Loop lag", lag], ["", tools]);
  let draining = false;
  button.onclick = () => drain(name, !draining).then(refreshAudit);
  return {
    node,
    update(broker) {
      draining = broker.draining;
      const [kind, words] = STATUS[broker.status] ?? ["", broker.status];
      const engine = broker.engine === "local" ? "" : `, ${broker.engine}${broker.engine_problem ? " unreachable" : ""}`;
      attribute(status, "class", `badge ${(draining || broker.engine_problem) && kind === "good" ? "warn" : kind}`);
      attribute(status, "title", broker.engine_problem ?? "");
      text(status, (draining ? `${words}, draining` : words) + engine);
      attribute(node, "class", broker.status === "dead" || broker.status === "lapsed" ? "dead" : "");
      const part = broker.rate / broker.mcap, allocated = broker.allocated / broker.mcap;
      load.set(part, `${Math.round(100 * part)} % used, ${Math.round(100 * allocated)} % allocated`, allocated);
      const gone = broker.status === "dead";
      text(rate, gone ? "–" : count(broker.rate));
      text(mcap, count(broker.mcap));
      text(rcap, gone ? "–" : count(broker.rcap));
      text(lag, gone ? "–" : ms(broker.lag_ms));
      attribute(head, "title", broker.address);
      text(button, draining ? "Use again…" : "Drain…");
      attribute(button, "aria-label", draining ? `Use ${name} again` : `Drain ${name}`);
    },
  };
});

function slo(topic) {
  if (topic.slo_met == null) return ["", `– ${ms(topic.slo_ms)}`, "no messages"];
  return topic.slo_met ? ["good", `✓ ${ms(topic.slo_ms)}`, "met"] : ["bad", `✕ ${ms(topic.slo_ms)}`, "not met"];
}

const renderTopics = rows($("topics").tBodies[0], (name) => {
  const link = make("button", { type: "button", class: "link" }, name);
  const badge = make("span", { class: "badge" }), state = cell(), k = cell("n"), rate = cell("n"), waiting = cell("n");
  const access = cell("n"), total = cell("n"), penalty = cell("n"), met = cell(), shares = cell("wide");
  const svg = draw("svg", { class: "mini", preserveAspectRatio: "none", role: "img" });
  const r = draw("path", { class: "r" }), b = draw("path", { class: "b" });
  svg.append(r, b);
  shares.append(svg);
  met.append(badge);
  const node = row(
    make("th", { scope: "row" }, link), ["SLO", met], ["State", state], ["k", k], ["Shares", shares],
    ["msg/s", rate], ["Waiting", waiting], ["p99 access", access], ["p99 total", total], ["DRL penalty", penalty],
  );
  link.onclick = () => (location.hash = `topic=${encodeURIComponent(name)}`);
  return {
    node,
    update({ topic, names }) {
      const [kind, words, meaning] = slo(topic);
      attribute(badge, "class", `badge ${kind}`);
      attribute(badge, "title", `p99 within ${ms(topic.slo_ms)}: ${meaning}`);
      text(badge, words);
      text(state, topic.paused ? `${topic.state}, paused` : topic.state);
      text(k, count(topic.k));
      text(rate, count(topic.rate));
      text(waiting, count(topic.waiting));
      text(access, p99(topic.access_ms));
      text(total, p99(topic.total_ms));
      text(penalty, ms(topic.penalty_ms));
      attribute(node, "class", name === chosen ? "chosen" : "");
      attribute(link, "aria-pressed", String(name === chosen));
      drawShares(svg, r, b, topic, names);
    },
  };
});

function drawShares(svg, r, b, topic, names) {
  const width = 100 / Math.max(1, names.length);
  let tall = "", light = "";
  const said = [];
  names.forEach((name, i) => {
    const share = topic.brokers[name];
    if (!share?.r) return;
    const [high, deep] = [share.r / topic.r, share.b / topic.b].map((part) => Math.max(0.6, 20 * part).toFixed(1));
    tall += `M${(i + 0.1) * width} 20v-${high}h${0.42 * width}V20z`;
    light += `M${(i + 0.52) * width} 20v-${deep}h${0.38 * width}V20z`;
    said.push(`${name} ${Math.round((100 * share.r) / topic.r)} % of r, ${Math.round((100 * share.b) / topic.b)} % of b`);
  });
  attribute(svg, "viewBox", "0 0 100 20");
  attribute(r, "d", tall);
  attribute(b, "d", light);
  attribute(svg, "aria-label", said.join("; ") || "no shares");
}

// The selected topic.

const PARTS = { access_ms: "Token wait (access)", processing_ms: "Broker (processing)", total_ms: "End to end (total)" };
const charts = Object.entries(PARTS).map(([key, title]) => [key, chart(title)]);
$("charts").append(...charts.map(([, each]) => each.node));
$("charts").after(legend());

function choose() {
  const found = /^#topic=(.+)$/.exec(location.hash);
  let name = null;
  try {
    name = found && decodeURIComponent(found[1]);
  } catch { /* a mistyped address selects no topic */ }
  if (name === chosen) return;
  chosen = name;
  points = [];
  generation = null;
  $("prices").hidden = true;
  $("explain-said").textContent = "";
  $("events").replaceChildren();
  render();
  if (chosen) {
    readHistory(chosen);
    $("detail-title").focus();
    $("detail").scrollIntoView({ block: "nearest" });
  }
}

async function readHistory(name) {
  const found = await ask("GET", `/v1/topics/${encodeURIComponent(name)}/history`).catch(() => null);
  if (!found || name !== chosen) return;
  const first = points[0]?.at_ms ?? Infinity;
  points = [...found.points.filter((each) => each.at_ms < first), ...points];
  render();
}

function keepPoint() {
  const topic = chosen && cluster.topics[chosen];
  if (!topic) return;
  const { access_ms, processing_ms, total_ms } = structuredClone(topic);
  points.push({ at_ms: cluster.at_ms, access_ms, processing_ms, total_ms });
  while (points[0].at_ms < cluster.at_ms - KEPT_MS) points.shift();
}

const renderSharesTable = rows($("shares").tBodies[0], (name) => {
  const r = bar(), b = bar("burst"), rText = make("span"), bText = make("span");
  const publishers = cell("n"), rate = cell("n"), waiting = cell("n"), access = cell("n"), total = cell("n");
  const labelled = (each, words) => make("td", { class: "wide" }, make("div", { class: "labelled" }, each.node, words));
  const node = row(
    make("th", { scope: "row" }, name), ["Publishers", publishers], ["r", labelled(r, rText)], ["b", labelled(b, bText)],
    ["msg/s", rate], ["Waiting", waiting], ["p99 access", access], ["p99 total", total],
  );
  return {
    node,
    update({ share, topic }) {
      r.set(share.r / topic.r, `${Math.round((100 * share.r) / topic.r)} % of r`);
      b.set(share.b / topic.b, `${Math.round((100 * share.b) / topic.b)} % of b`);
      text(rText, amount(share.r));
      text(bText, amount(share.b));
      text(publishers, count(share.publishers));
      text(rate, count(share.rate));
      text(waiting, count(share.waiting));
      text(access, p99(share.access_ms));
      text(total, p99(share.total_ms));
    },
  };
});

const renderAdvice = (() => {
  const list = rows($("advice-list"), (kind) => {
    const words = make("span"), since = make("time");
    const node = make("li", { class: "notice" }, make("strong", {}, kind.replaceAll("-", " ")), ": ", words, " ", since);
    return {
      node,
      update(advice) {
        text(words, advice.text);
        text(since, `(for ${count(advice.since_s)} s)`);
      },
    };
  });
  return (advice) => {
    show($("advice"), advice.length > 0);
    list(advice.map((each) => [each.kind, each]));
  };
})();

function renderDetail() {
  const topic = chosen && cluster.topics[chosen];
  show($("detail"), Boolean(topic));
  if (!topic) return;
  text($("detail-title"), topic.topic);
  const [, , meaning] = slo(topic);
  const left = topic.quantile === "0.99" ? "p99" : `${topic.quantile} quantile`;
  text(
    $("contract"),
    `(r, b) = (${amount(topic.r)}/s, ${amount(topic.b)}), ${left} within ${ms(topic.slo_ms)}: ${meaning}. ` +
      `${count(topic.publishers)} publishers on k = ${topic.k} (policy ${topic.policy}), ${topic.durability}, ${topic.state}` +
      `${topic.paused ? ", paused" : ""}.`,
  );
  text($("penalty"), penaltyInWords(topic));
  const note = progress(topic);
  show($("fitting"), Boolean(note));
  text($("fitting"), note);
  text($("pause"), topic.paused ? "Resume…" : "Pause…");
  for (const [key, each] of charts) each.update(points, key, topic.slo_ms, cluster.at_ms);
  const shares = Object.entries(topic.brokers).sort(([a], [b]) => compare(a, b));
  renderSharesTable(shares.map(([name, share]) => [name, { share, topic }]));
  renderLending(topic);
  renderAdvice(topic.advice);
  if (generation !== topic.generation) {
    generation = topic.generation;
    readEvents(topic.topic);
  }
}

function penaltyInWords(topic) {
  if (topic.penalty_ms == null) return "DRL penalty: unknown so far.";
  if (Object.values(topic.brokers).filter((each) => each.r).length < 2) return "DRL penalty: none, the bucket is not split.";
  const over = topic.over_contract ? " More messages arrive than the contract allows, which causes part of the wait." : "";
  return (
    `DRL penalty: ${ms(topic.penalty_ms)}. The p99 wait for tokens is ${p99(topic.access_ms)}; ` +
    `with one bucket, the model predicts ${ms(topic.one_bucket_ms)}.${over}`
  );
}

function progress(topic) {
  if (topic.waits_for?.length) return `Waiting for ${topic.waits_for.join(", ")} to receive the contract.`;
  if (topic.fitting) return `Fitting ${count(topic.fitting.publishers)} publishers: ${topic.fitting.state}, ${topic.fitting.rounds} rounds measured.`;
  if (topic.shares.short_of && topic.shares.short_since_s > 2) return shortInWords(topic.shares);
  if (topic.moving) return `Moving ${count(topic.moving)} publishers to another broker.`;
  if (topic.fitted && !topic.fitted.met) return `No placement met the SLO: ${topic.fitted.reason}`;
  return "";
}

function shortInWords(shares) {
  const waits = shares.waits_for.length ? `; waiting for ${shares.waits_for.join(", ")}` : "";
  return `Shares: ${shares.short_of}, for ${Math.round(shares.short_since_s)} s${waits}.`;
}

async function readEvents(name) {
  const found = await ask("GET", `/v1/topics/${encodeURIComponent(name)}`).catch(() => null);
  if (!found || name !== chosen) return;
  const now = cluster.at_ms;
  $("events").replaceChildren(
    ...found.events.reverse().map((event) => make(
      "li", {}, make("time", {}, clock(now - 1000 * event.ago_s)), make("strong", {}, event.kind), make("span", {}, event.text),
    )),
  );
}

async function explain() {
  const name = chosen, said = $("explain-said");
  text(said, "Simulating every k…");
  try {
    const found = await ask("GET", `/v1/topics/${encodeURIComponent(name)}/explain`);
    if (name !== chosen) return;
    text(said, found.note ?? `Predicted by the model; the topic is on k = ${found.k}.`);
    $("prices").hidden = !found.predicted.length;
    $("prices").tBodies[0].replaceChildren(...found.predicted.map((each) => {
      const head = make("th", { scope: "row" }, each.k === found.k ? `${each.k} (now)` : String(each.k));
      if (!each.possible) return row(head, ["", make("td", { colspan: 4, class: "wide" }, each.reason)]);
      const part = (key) => make("td", { class: "n" }, p99(each[key]));
      const met = make("span", { class: `badge ${each.meets_slo ? "good" : "bad"}` }, each.meets_slo ? "✓ met" : "✕ not met");
      return row(head, ["p99 access", part("access_ms")], ["p99 processing", part("processing_ms")], ["p99 total", part("total_ms")], ["SLO", make("td", {}, met)]);
    }));
  } catch (error) {
    text(said, error.message);
  }
}

async function refreshAudit() {
  if (!$("audit").open) return;
  const { entries } = await ask("GET", "/v1/audit");
  $("actions").replaceChildren(...entries.slice(0, 100).map((each) => {
    const on = Object.entries(each.arguments).map(([key, value]) => `${key} ${Array.isArray(value) ? value.join(", ") : value}`).join(", ");
    return row(
      make("th", { scope: "row" }, new Date(each.at_ms).toLocaleString("en-GB")),
      ["Who", make("td", {}, each.who)], ["Action", make("td", {}, each.action)], ["Details", make("td", { class: "wide" }, on)],
    );
  }));
}

// Controls.

$("create").onclick = () => create().then(refreshAudit).catch((error) => tell(error.message));
$("login").onclick = () => askToken().then((done) => done && listen());
$("logout").onclick = () => logOut().then(listen).catch((error) => tell(error.message));
$("change").onclick = () => change(cluster.topics[chosen]).then(refreshAudit);
$("fit").onclick = () => fit(chosen).then(refreshAudit);
$("pause").onclick = () => pause(chosen, !cluster.topics[chosen].paused).then(refreshAudit);
$("move").onclick = () => {
  const usable = Object.values(cluster.brokers).filter((each) => each.status === "alive" && !each.draining);
  move(chosen, usable.map((each) => each.name).sort(compare)).then(refreshAudit).catch((error) => tell(error.message));
};
$("close").onclick = () => {
  location.hash = "";
  $("topics-title").focus();
};
$("explain").onclick = explain;
$("filter").oninput = $("only").onchange = render;
$("audit").ontoggle = () => refreshAudit().catch((error) => tell(error.message));
addEventListener("hashchange", choose);
choose();
listen();
