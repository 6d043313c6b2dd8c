// Building blocks: elements whose text is never HTML, and tables that change only where needed.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** The same in SVG, without children. */
export function draw(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Set text, class or attribute only if it differs, to save the browser work. */
export function text(node, value) {
  if (node.firstChild?.nodeType === Node.TEXT_NODE && node.childNodes.length === 1) {
    if (node.firstChild.data !== value) node.firstChild.data = value;
  } else node.textContent = value;
}
export function attribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}
export function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

/** A bar: a fraction of the whole, with a label. */
export function bar(kind = "") {
  const fill = make("i"), mark = make("b");
  const node = make("div", { class: `bar ${kind}`, role: "img" }, fill, mark);
  mark.hidden = true;
  let last = "";
  return {
    node,
    set(part, words, marked = null) {
      const now = `${part.toFixed(3)} ${words} ${marked}`;
      if (now === last) return;
      last = now;
      fill.style.width = `${Math.min(100, Math.max(0, 100 * part))}%`;
      mark.hidden = marked == null;
      if (marked != null) mark.style.left = `calc(${Math.min(100, 100 * marked)}% - 2px)`;
      node.setAttribute("aria-label", words);
      node.title = words;
    },
  };
}

/** Rows by key, in the order given: build new rows, update known ones, remove the rest. */
export function rows(body, build) {
  const known = new Map();
  return (entries) => {
    const keys = new Set(entries.map(([key]) => key));
    for (const [key, row] of known) {
      if (!keys.has(key)) {
        row.node.remove();
        known.delete(key);
      }
    }
    let place = body.firstElementChild;
    for (const [key, value] of entries) {
      let row = known.get(key);
      if (!row) known.set(key, (row = build(key)));
      if (row.node !== place) body.insertBefore(row.node, place);
      else place = place.nextElementSibling;
      row.update(value);
    }
  };
}

/** A row of a table: the first cell names it; the others carry their heading as a label for phones. */
export function row(head, ...cells) {
  const node = make("tr", { role: "row" }, head);
  head.setAttribute("role", "rowheader");
  for (const [label, cell] of cells) {
    cell.setAttribute("role", "cell");
    if (label) cell.dataset.label = label;
    node.append(cell);
  }
  return node;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const count = (value) => whole.format(value);
export const amount = (value) => fine.format(value);
export function ms(value) {
  if (value == null) return "–";
  if (value >= 10_000) return `${amount(value / 1000)} s`;
  return `${value >= 100 ? whole.format(value) : Number(value.toPrecision(3))} ms`;
}
export const p99 = (points) => ms(points?.p99);
export const clock = (at) => new Date(at).toLocaleTimeString("en-GB");
