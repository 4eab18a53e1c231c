// What a head does over all the data, where the file has it: its strongest events and some of each decile, how its
// measures are distributed, and what it attends to. An event is a query with the key from which the head writes most.

const { events } = atlas;
const eventList = byId("snippets");
const eventMap = byId("event-map");
const STRONGEST_RANK = 10; // above the deciles
let listed = []; // the events in the list
let opened = {}; // the event that is shown, and the query by whose weights its keys are shaded

const rankOf = (event) => event.decile ?? STRONGEST_RANK;
const keysOf = (event) => event.keys ?? event.queries;
const quoted = (id) => `‘\u2068${events.tokens[id]}\u2069’`;
const placeOf = ({ row, at }) => `${row}, token ${at}`;
const shownRoot = (root) => ((root / 255) ** 2).toFixed(2);
const aside = (words) => element("span", { class: "small muted" }, words);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

// 255 times the square root of the weight of each key, for the event's query, or for another query of its map.
function rootsOf(event, query = event.query) {
  if (query === event.query) return (event.roots ??= decoded(event.weights));
  const size = keysOf(event).length;
  return decoded(event.map, query * size, size);
}

// Tokens as running text; `marks` are the classes of some of them, `roots` shade them.
function runningText(ids, marks, roots = []) {
  const tokens = ids.map((id, at) => element("bdi", { class: marks[at] ?? "" }, events.tokens[id]));
  [...roots].forEach((root, at) => {
    tokens[at].style.setProperty("--weight", root / 255);
    tokens[at].title = `weight ${shownRoot(root)}`;
  });
  const isWords = !hasSpaces(ids.map((id) => events.tokens[id]));
  return element("span", { class: `running ${isWords ? "words" : ""}` }, ...tokens);
}

// The text of an event with its query and key marked; in cross-attention, the source and the target.
function eventText(event, query = event.query) {
  const keyMark = query === event.query && event.key !== null ? { [event.key]: "key" } : {};
  const queryMark = { [query]: query === event.key && event.key in keyMark ? "query key" : "query" };
  const roots = rootsOf(event, query);
  if (!event.keys) return [runningText(event.queries, { ...keyMark, ...queryMark }, roots)];
  return [runningText(event.keys, keyMark, roots), runningText(event.queries, { [query]: "query" })];
}

function namesOf(event) {
  const key = event.key === null ? `key ${Math.abs(event.outside)} tokens away` : `key ${quoted(keysOf(event)[event.key])}`;
  return `Query ${quoted(event.queries[event.query])}, ${key}`;
}

function numbersOfEvent(event) {
  const weight = event.key === null ? "" : `weight ${shownRoot(rootsOf(event)[event.key])}, `;
  return `${weight}strength ${shownNumber(event.strength)}`;
}

function makeEvents() {
  if (!events) return;
  makeSearch();
  makeProjection();
  byId("sampled").textContent = events.sampled;
  rove(eventList, alongTokens);
  for (const kind of ["click", "focusin"]) {
    eventList.addEventListener(kind, ({ target }) => showEvent(listed[target.closest("button")?.dataset.event] ?? opened.event));
  }
  // The query of the map, by pointer or arrow keys.
  const follow = (query) => showEvent(opened.event, clamped(query, 0, opened.event.queries.length - 1));
  const pointed = (event) => Math.floor(sharesOf(event, eventMap.getBoundingClientRect())[1] * opened.event.queries.length);
  eventMap.addEventListener("pointermove", (event) => follow(pointed(event)));
  eventMap.addEventListener("pointerleave", () => showEvent(opened.event));
  eventMap.addEventListener("keydown", (event) => {
    if (hasModifier(event) || !WAYS[event.key]?.[1]) return;
    event.preventDefault();
    follow(opened.query + WAYS[event.key][1]);
  });
}

function showEvents(head) {
  byId("events").hidden = !head.events;
  if (!head.events) return;
  listEvents(head);
  const { histograms, shares } = head.events;
  byId("distributions").replaceChildren(...events.measures.flatMap((measure, at) => distributionRow(measure, histograms[at])));
  byId("shares").replaceChildren(...events.classes.flatMap((name, at) => shareRow(name, ...shares[at])));
  showProjection(head);
}

// List the events of a head that the search finds, the strongest first.
function listEvents(head) {
  const { snippets } = head.events;
  listed = snippets.filter(isMatch).sort((a, b) => rankOf(b) - rankOf(a)); // stable within a decile
  const button = (event) => {
    const [index, words] = [listed.indexOf(event), `${numbersOfEvent(event)} · ${placeOf(event)}`];
    const attributes = { type: "button", class: "snippet", tabindex: index ? -1 : 0, "data-event": index };
    attributes["aria-label"] = `${namesOf(event)}, ${words}`;
    return element("button", attributes, ...eventText(event), aside(words));
  };
  const heading = (rank) => element("h4", {}, rank === STRONGEST_RANK ? "The strongest" : `Decile ${rank + 1} of 10 by strength`);
  eventList.replaceChildren(...[...Map.groupBy(listed, rankOf)].flatMap(([rank, of]) => [heading(rank), ...of.map(button)]));
  byId("listed").textContent = matching ? `${listed.length} of ${count(snippets.length, "event")} match the search.` : "";
  showEvent(listed[0]);
}

// Show an event with its keys shaded by their weights; and by those of another query of its map.
function showEvent(event, query = event?.query) {
  byId("event").hidden = !event;
  opened = { event, query };
  if (!event) return;
  eventList.querySelector("[aria-current]")?.removeAttribute("aria-current");
  eventList.querySelector(`[data-event="${listed.indexOf(event)}"]`)?.setAttribute("aria-current", "true");
  byId("event-title").textContent = capitalised(placeOf(event));
  byId("event-text").replaceChildren(...eventText(event, query));
  const roots = [...rootsOf(event, query)];
  const best = strongest(roots)[0];
  const promoted = event.promotes ? ` The output promotes ${event.promotes.map(quoted).join(", ")}.` : "";
  const byMap = `Query ${quoted(event.queries[query])}, key ${quoted(keysOf(event)[best])}: weight ${shownRoot(roots[best])}.`;
  byId("event-sentence").textContent = query === event.query ? `${namesOf(event)}: ${numbersOfEvent(event)}.${promoted}` : byMap;
  byId("event-map-side").hidden = !event.map;
  if (!event.map) return;
  eventMap.style.setProperty("--at", query / event.queries.length);
  eventMap.style.setProperty("--size", 1 / event.queries.length);
  const image = new ImageData(keysOf(event).length, event.queries.length);
  new Uint32Array(image.data.buffer).set(Array.from(decoded(event.map), (root) => pixels[root]));
  const canvas = filled(eventMap.querySelector("canvas"), { width: image.width, height: image.height });
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const row = (name, ...fields) => [element("tr", {}, element("th", { scope: "row" }, name), ...fields)];
const numberField = (words) => element("td", { class: "number" }, words);

// A measure's histogram over queries, with a line at the mean, and the quartiles.
function distributionRow({ name, low, high }, counts) {
  const total = counts.reduce((sum, number) => sum + number, 0);
  if (!total) return [];
  const valueAt = (place) => low + (place / counts.length) * (high - low);
  const mean = counts.reduce((sum, number, bin) => sum + number * (bin + 0.5), 0) / total;
  const quartiles = [0.25, 0.75].map((share) => {
    let left = share * total;
    const bin = counts.findIndex((number) => (left -= number) <= 0);
    return shownNumber(valueAt(bin + 1 + left / counts[bin]));
  });
  const bars = counts.map((number, bin) => `M${bin + 0.5} 24v${(-24 * number) / Math.max(...counts)}`).join("");
  const box = { class: "bars", viewBox: `0 0 ${counts.length} 24`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const drawing = shape("svg", box, shape("path", { d: bars }), shape("path", { class: "mean", d: `M${mean} 24V0` }));
  const ends = [low, high].map((value) => element("span", {}, Number(value.toPrecision(3))));
  const histogram = element("td", {}, drawing, element("span", { class: "ends" }, ...ends));
  return row(name, histogram, numberField(shownNumber(valueAt(mean))), numberField(quartiles.join(" to ")));
}

// The share of attention on a class of keys, with a line at the share that is expected.
function shareRow(name, share, expected) {
  if (share === null) return [];
  const bar = element("td", { class: "bar marked" });
  bar.style.setProperty("--weight", share);
  bar.style.setProperty("--expected", expected);
  return row(name, bar, numberField(percent(share)), numberField(percent(expected)));
}
