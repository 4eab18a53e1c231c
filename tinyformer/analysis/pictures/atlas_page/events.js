// What a head does over all the data, where the file has it: its strongest events and some of each decile, how its
// measures are distributed, and what it attends to. An event is a query with the key from which the head writes most.

const { events } = atlas;
const eventList = byId("snippets");
const eventMap = byId("event-map");
const STRONGEST_RANK = 10; // above the deciles
const MIDDLE = [0.25, 0.75]; // the quantiles between which half of the queries are

let listed = []; // the events in the list
let opened = { event: null, query: 0 };

const keysOf = (event) => event.keys ?? event.queries;
const quoted = (id) => `‘\u2068${events.tokens[id]}\u2069’`;
const placeOf = ({ row, at }) => `${events.rows} ${row}, token ${at}`;
const rootsOf = (event) => (event.roots ??= decoded(event.weights)); // 255 times the square root of each weight
const squared = (root) => ((root / 255) ** 2).toFixed(2);

// Tokens as running text, with the query and the key marked.
function runningText(ids, marks) {
  const text = element("span", { class: "running" });
  text.append(...ids.map((id, at) => element("bdi", { class: marks[at] ?? "" }, events.tokens[id])));
  text.classList.toggle("words", !hasSpaces(ids.map((id) => events.tokens[id])));
  return text;
}

// The text of an event, in which keys are shaded by the square root of a weight; in cross-attention, source and target.
function eventText(event, query = event.query) {
  const isOpen = query === event.query;
  const keys = runningText(keysOf(event), { [event.key]: isOpen ? "key" : "" });
  const roots = isOpen ? rootsOf(event) : rootsOfQuery(event, query);
  [...keys.children].forEach((token, at) => {
    token.style.setProperty("--weight", roots[at] / 255);
    token.title = squared(roots[at]);
  });
  if (event.keys) return [keys, runningText(event.queries, { [query]: "query" })];
  keys.children[query].classList.add("query");
  return [keys];
}

function rootsOfQuery(event, query) {
  const columns = keysOf(event).length;
  event.rows ??= decoded(event.map);
  return event.rows.subarray(query * columns, (query + 1) * columns);
}

function numbersOfEvent(event) {
  const key = event.key === null ? "" : `weight ${squared(rootsOf(event)[event.key])}, `;
  return `${key}strength ${shownNumber(event.strength)}`;
}

const namesOf = (event) => `query ${quoted(event.queries[event.query])}, key ${quoted(keysOf(event)[event.key])}`;

function eventButton(event, index) {
  const attributes = { type: "button", class: "snippet", tabindex: -1, "data-event": index };
  const label = `${capitalised(namesOf(event))}, ${numbersOfEvent(event)}, ${placeOf(event)}`;
  const numbers = element("span", { class: "small muted" }, `${numbersOfEvent(event)} · ${placeOf(event)}`);
  return element("button", { ...attributes, "aria-label": label }, ...eventText(event), numbers);
}

function makeEvents() {
  for (const part of document.querySelectorAll('[data-needs="events"]')) part.hidden = !events;
  if (!events) return;
  for (const place of document.querySelectorAll(".sampled")) place.textContent = events.sampled;
  rove(eventList, alongTokens);
  const choose = ({ target }) => {
    const button = target.closest("button");
    if (button) showEvent(listed[button.dataset.event]);
  };
  for (const kind of ["click", "focusin"]) eventList.addEventListener(kind, choose);
  // The query of the map, by pointer or arrow keys.
  const follow = (query) => showEvent(opened.event, Math.max(0, Math.min(query, opened.event.queries.length - 1)));
  eventMap.addEventListener("pointermove", ({ clientY }) => {
    const box = eventMap.getBoundingClientRect();
    follow(Math.floor(((clientY - box.top) / box.height) * opened.event.queries.length));
  });
  eventMap.addEventListener("pointerleave", () => showEvent(opened.event));
  eventMap.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by || event.shiftKey) return;
    event.preventDefault();
    follow(opened.query + by);
  });
}

// List the events of a head that the search finds; their distributions do not depend on it.
function showEvents(head) {
  if (!events) return;
  byId("events").hidden = !head.events;
  if (!head.events) return;
  listEvents(head);
  const rows = events.measures.map((measure, at) => distributionRow(measure, head.events.histograms[at]));
  byId("distributions").replaceChildren(...rows.flat());
  byId("shares").replaceChildren(...events.classes.flatMap((name, at) => shareRow(name, head.events.shares[at])));
  showProjection(head);
}

function listEvents(head) {
  const { snippets } = head.events;
  listed = snippets.filter(isMatch).sort((a, b) => rankOf(b) - rankOf(a)); // stable within a decile
  const groups = Map.groupBy(listed, rankOf);
  eventList.replaceChildren(
    ...[...groups].flatMap(([rank, of]) => [
      element("h4", {}, rank === STRONGEST_RANK ? "The strongest" : `Decile ${rank + 1} of 10 by strength`),
      ...of.map((event) => eventButton(event, listed.indexOf(event))),
    ]),
  );
  if (listed.length) eventList.querySelector("button").tabIndex = 0;
  byId("listed").textContent =
    listed.length === snippets.length ? "" : `${listed.length} of ${count(snippets.length, "event")} match the search.`;
  showEvent(listed[0]);
}

const rankOf = (event) => event.decile ?? STRONGEST_RANK;

// Show an event with its keys shaded by their weights; and by those of another query of its map.
function showEvent(event, query = event?.query) {
  byId("event").hidden = !event;
  if (!event) return;
  const isNew = event !== opened.event;
  opened = { event, query };
  for (const button of eventList.querySelectorAll("button")) {
    if (listed[button.dataset.event] === event) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  byId("event-title").textContent = capitalised(placeOf(event));
  byId("event-text").replaceChildren(...eventText(event, query));
  const promoted = event.promotes?.map(quoted).join(", ");
  const roots = query === event.query ? rootsOf(event) : rootsOfQuery(event, query);
  const best = strongest([...roots])[0];
  byId("event-sentence").textContent =
    query === event.query
      ? `${capitalised(namesOf(event))}: ${numbersOfEvent(event)}.${promoted ? ` The output promotes ${promoted}.` : ""}`
      : `Query ${quoted(event.queries[query])} attends most to ${quoted(keysOf(event)[best])}, weight ${squared(roots[best])}.`;
  byId("event-map-side").hidden = !event.map;
  if (!event.map) return;
  eventMap.style.setProperty("--at", query / event.queries.length);
  eventMap.style.setProperty("--size", 1 / event.queries.length);
  if (!isNew) return;
  const canvas = eventMap.querySelector("canvas");
  [canvas.width, canvas.height] = [keysOf(event).length, event.queries.length];
  const image = new ImageData(canvas.width, canvas.height);
  new Uint32Array(image.data.buffer).set(Array.from(decoded(event.map), (root) => pixels[root]));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// A measure's histogram over queries, with a mark at its mean.
function distributionRow({ name, low, high }, counts) {
  const total = counts?.reduce((sum, number) => sum + number, 0);
  if (!total) return [];
  const width = (high - low) / counts.length;
  const mean = counts.reduce((sum, number, at) => sum + number * (low + (at + 0.5) * width), 0) / total;
  const [first, last] = MIDDLE.map((share) => {
    let left = share * total;
    const bin = counts.findIndex((number) => (left -= number) <= 0);
    return low + (bin + 1 + left / counts[bin]) * width;
  });
  const most = Math.max(...counts);
  const bars = counts.map((number, at) => `M${at + 0.5} 24v${-24 * (number / most)}`).join("");
  const at = ((mean - low) / (high - low)) * counts.length;
  const drawing = shape("svg", { class: "bars", viewBox: `0 0 ${counts.length} 24`, preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(shape("path", { d: bars }), shape("path", { class: "mean", d: `M${at} 24V0` }));
  const ends = element("span", { class: "ends" }, element("span", {}, shownTick(low)), element("span", {}, shownTick(high)));
  return [
    element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      element("td", {}, drawing, ends),
      element("td", { class: "number" }, shownNumber(mean)),
      element("td", { class: "number" }, `${shownNumber(first)} to ${shownNumber(last)}`),
    ),
  ];
}

const shownTick = (value) => String(Number(value.toPrecision(3))).replace("-", "−");

// The share of attention on a class of keys, with a mark at the share that is expected.
function shareRow(name, pair) {
  if (!pair || pair.includes(null)) return [];
  const [share, expected] = pair;
  const bar = element("td", { class: "bar marked" });
  bar.style.setProperty("--weight", share);
  bar.style.setProperty("--expected", expected);
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const numbers = [share, expected].map((value) => element("td", { class: "number" }, percent(value)));
  return [element("tr", {}, element("th", { scope: "row" }, name), bar, ...numbers)];
}
