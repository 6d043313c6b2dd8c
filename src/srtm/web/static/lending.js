// Lending in the view of a topic: which broker lends to which, how much, and how long an ask takes.

import { $, amount, attribute, bar, count, make, ms, row, rows, show, text } from "./dom.js";

const cell = (kind) => make("td", kind ? { class: kind } : {});

const renderPairs = rows($("lending-pairs").tBodies[0], () => {
  const flow = bar(), flowText = make("span");
  const head = make("th", { scope: "row" });
  const where = make("td", { class: "wide" }, make("div", { class: "labelled" }, flow.node, flowText));
  const lent = cell("n"), taken = cell("n"), lost = cell("n"), asks = cell("n"), p50 = cell("n"), tail = cell("n");
  const node = row(
    head, ["Tokens/s", where], ["Lent", lent], ["Taken", taken], ["Lost", lost], ["Asks", asks],
    ["Round trip p50", p50], ["Round trip p99", tail],
  );
  return {
    node,
    update({ pair, most }) {
      text(head, `${pair.lender} → ${pair.borrower}`);
      flow.set(most ? pair.per_second / most : 0, `${amount(pair.per_second)} tokens per second`);
      text(flowText, amount(pair.per_second));
      text(lent, count(pair.lent));
      text(taken, count(pair.borrowed));
      text(lost, count(pair.lost));
      const refused = pair.refused ? `, ${count(pair.refused)} refused` : "";
      text(asks, count(pair.asked) + refused);
      attribute(asks, "title", `${count(pair.unanswered)} without an answer in time${refused}`);
      text(p50, ms(pair.rtt_ms?.p50));
      text(tail, ms(pair.rtt_ms?.p99));
    },
  };
});

function inWords(lending) {
  const rule = lending.mode === lending.chosen ? lending.mode : `${lending.mode}, now ${lending.chosen}`;
  if (lending.chosen === "off" && !lending.asked) return `Rule: ${rule}.`;
  const part = lending.lent ? `, ${Math.round((100 * lending.lost) / lending.lent)} % of them lost on the way` : "";
  return `Rule: ${rule}. Brokers asked ${count(lending.asked)} times and lent ${count(lending.lent)} tokens${part}.`;
}

/** Show what the brokers of a topic lend each other; nothing if its contract says that they do not. */
export function renderLending(topic) {
  const { lending } = topic;
  show($("lending"), lending.mode !== "off");
  if (lending.mode === "off") return;
  text($("lending-said"), inWords(lending));
  show($("lending-accused"), lending.accused.length > 0);
  text($("lending-accused"), lending.accused.map((each) => `Broker ${each.broker} is excluded from lending: ${each.evidence}.`).join(" "));
  const most = Math.max(0, ...lending.peers.map((pair) => pair.per_second));
  show($("lending-pairs"), lending.peers.length > 0);
  renderPairs(lending.peers.map((pair) => [`${pair.lender}\0${pair.borrower}`, { pair, most }]));
}
