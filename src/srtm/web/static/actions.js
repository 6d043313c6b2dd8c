// An operator's actions: each asks for confirmation and reports its result. A cookie that scripts cannot read is the login.

import { $, count, make } from "./dom.js";

let me = { name: null, role: null, closed: false, open: true };

/** Ask the controller who is logged in, and show it. Resolves to whether the page may show the cluster. */
export async function whoAmI() {
  return know(await ask("GET", "/v1/session"));
}

function know(session) {
  me = session;
  $("login").hidden = Boolean(me.name) || me.open;
  $("logout").hidden = !me.name;
  $("logout").textContent = me.name ? `Log out ${me.name} (${me.role})` : "";
  return me.role !== null;
}

/** Show a message for a few seconds. */
export function tell(words) {
  const said = make("p", {}, words);
  $("news").append(said);
  setTimeout(() => said.remove(), 8000);
}

/** The JSON at a path; an Error with the controller's message if it refuses. */
export async function ask(method, path, body) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const found = answer.status === 204 ? null : await answer.json().catch(() => null);
  if (answer.ok) return found;
  if (answer.status === 401 && path !== "/v1/session") await whoAmI().catch(() => null);
  const detail = found?.detail;
  const said = Array.isArray(detail) ? detail.map((each) => `${each.loc.slice(1).join(".")}: ${each.msg}`).join("; ") : detail;
  throw new Error(answer.status === 401 ? "The controller requires a valid token." : said ?? `${answer.status} ${answer.statusText}`);
}

const logIn = async (token) => know(await ask("POST", "/v1/session", { token }));

const TOKEN = { name: "token", label: "Token", type: "password", required: true, autocomplete: "off" };

/** Ask for confirmation and values, then act; stay open with the reason if refused. Resolves to whether it was done. */
function confirmed({ title, text = "", fields = [], yes, act, done }) {
  const dialog = $("ask"), form = dialog.querySelector("form"), problem = $("ask-problem");
  const needsToken = () => !me.name && !me.open && !fields.includes(TOKEN);
  $("ask-title").textContent = title;
  $("ask-text").textContent = text;
  $("ask-text").hidden = !text;
  $("ask-yes").textContent = yes;
  problem.hidden = true;
  const build = (all) => $("ask-fields").replaceChildren(...all.map(field));
  build(needsToken() ? [...fields, TOKEN] : fields);
  dialog.showModal();
  return new Promise((resolve) => {
    const end = (was) => {
      form.onsubmit = $("ask-no").onclick = dialog.oncancel = null;
      dialog.close();
      resolve(was);
    };
    $("ask-no").onclick = () => end(false);
    dialog.oncancel = () => end(false); // Escape
    form.onsubmit = async (event) => {
      event.preventDefault();
      const given = Object.fromEntries(new FormData(form));
      $("ask-yes").disabled = true;
      try {
        if (given.token && !fields.includes(TOKEN)) await logIn(given.token);
        const answer = await act(given);
        tell(done(given, answer));
        end(true);
      } catch (error) {
        problem.textContent = error.message;
        problem.hidden = false;
        if (needsToken() && !form.elements.token) $("ask-fields").append(field(TOKEN));
      } finally {
        $("ask-yes").disabled = false;
      }
    };
  });
}

function field({ name, label, options, ...attributes }) {
  const id = `ask-${name}`;
  const input = options
    ? make("select", { id, name }, ...options.map((each) => make("option", {}, each)))
    : make("input", { id, name, ...attributes });
  return make("label", { for: id }, label, input);
}

const at = (topic) => `/v1/topics/${encodeURIComponent(topic)}`;

export function askToken() {
  return confirmed({
    title: "Log in", text: "Enter the secret of a token. The login lasts 12 hours, until you log out, or until the token is revoked.",
    fields: [TOKEN], yes: "Log in", act: (given) => logIn(given.token), done: () => `Logged in as ${me.name} (${me.role}).`,
  });
}

export async function logOut() {
  await ask("DELETE", "/v1/session");
  tell("Logged out.");
  return whoAmI();
}

const contract = ({ slo_ms = 1, r = "", b = "" } = {}) => [
  { name: "slo_ms", label: "SLO (ms)", type: "number", min: 0.001, step: "any", value: slo_ms, required: true },
  { name: "r", label: "r (tokens per second)", type: "number", min: 0.001, step: "any", value: r, required: true },
  { name: "b", label: "b (tokens)", type: "number", min: 1, step: "any", value: b, required: true },
];

const LENDING = ["off", "when_waiting", "early", "auto"];
const lending = (now) => ({ name: "lending", label: "Brokers lend tokens", options: [now, ...LENDING.filter((each) => each !== now)] });

export async function create() {
  const { policies } = await ask("GET", "policies.json");
  return confirmed({
    title: "New topic",
    text: "Puts a topic under contract: a token bucket (r, b) and a tail-latency SLO.",
    fields: [
      { name: "name", label: "Name", required: true, maxlength: 64, pattern: "[.a-zA-Z0-9_\\-]+(#ephemeral)?", autocomplete: "off" },
      ...contract(),
      { name: "policy", label: "Policy", options: policies },
      { name: "fit", label: "Fitting", options: ["model", "measure", "none"] },
      { name: "durability", label: "Durability", options: ["memory", "disk"] },
      { name: "overflow", label: "Messages without a token", options: ["wait", "drop"] },
      lending("off"),
    ],
    yes: "Create",
    act: ({ name, r, b, slo_ms, policy, fit, durability, overflow, lending }) =>
      ask("PUT", at(name), { r: Number(r), b: Number(b), slo_ms: Number(slo_ms), policy, fit, durability, overflow, lending }),
    done: ({ name }) => `Created topic ${name}.`,
  });
}

export function change(topic) {
  return confirmed({
    title: `Change ${topic.topic}`,
    text: "Messages keep flowing. A smaller bucket takes effect when every broker has cut its share; then the topic is fitted again.",
    fields: [...contract(topic), lending(topic.lending.mode)],
    yes: "Change",
    act: ({ r, b, slo_ms, lending }) => ask("PATCH", at(topic.topic), { r: Number(r), b: Number(b), slo_ms: Number(slo_ms), lending }),
    done: () => `Changed the contract of ${topic.topic}.`,
  });
}

export function fit(topic) {
  return confirmed({
    title: `Fit ${topic} again?`,
    text: "The controller places the publishers again and moves them while it measures. This takes seconds to minutes.",
    yes: "Fit", act: () => ask("POST", `${at(topic)}/fit`), done: () => `Started fitting ${topic}.`,
  });
}

export function pause(topic, on) {
  return confirmed({
    title: on ? `Pause ${topic}?` : `Resume ${topic}?`,
    text: on ? "Brokers keep accepting and storing messages; subscribers receive none until you resume." : "Subscribers receive the stored messages, then new ones.",
    yes: on ? "Pause" : "Resume",
    act: () => ask("POST", `${at(topic)}/pause?on=${on}`), done: () => `${on ? "Paused" : "Resumed"} ${topic}.`,
  });
}

export async function move(topic, brokers) {
  const { publishers } = await ask("GET", `${at(topic)}/publishers`);
  const here = [...new Set(publishers.map((each) => each.broker).filter(Boolean))].sort();
  if (!here.length) return void tell(`${topic} has no publishers to move.`);
  const chosen = (given) => publishers.filter((each) => each.broker === given.from).slice(0, Number(given.count)).map((each) => each.id);
  return confirmed({
    title: `Move publishers of ${topic}`,
    text: `The topic has ${count(publishers.length)} publishers. The first ones on the list move; the next fitting may move them again.`,
    fields: [
      { name: "from", label: "From", options: here },
      { name: "to", label: "To", options: brokers },
      { name: "count", label: "Number of publishers", type: "number", min: 1, max: publishers.length, step: 1, value: 1, required: true },
    ],
    yes: "Move",
    act: (given) => ask("POST", `${at(topic)}/move`, { publishers: chosen(given), broker: given.to }),
    done: (given) => `Moving ${count(chosen(given).length)} publishers of ${topic} to ${given.to}.`,
  });
}

export function drain(broker, on) {
  return confirmed({
    title: on ? `Drain ${broker}?` : `Use ${broker} again?`,
    text: on ? "Its publishers move to other brokers, and no new ones are placed on it." : "Publishers may be placed on it again.",
    yes: on ? "Drain" : "Use again",
    act: () => ask("POST", `/v1/brokers/${encodeURIComponent(broker)}/drain?on=${on}`),
    done: () => (on ? `Draining ${broker}.` : `${broker} is in use again.`),
  });
}
