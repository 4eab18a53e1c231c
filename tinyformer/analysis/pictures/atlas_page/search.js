// Search by token, where the file has events: heads by the number of their events in which the query or the key has a
// text, and in a head only these.

const sought = byId("sought");
const side = byId("sought-side");
const SOUGHT = { both: "query or key", query: "query", key: "key" };

let matching = null; // the tokens that contain the text, by index; null without a text

// A space can be typed as it is shown, or as a space.
const spaced = (text) => text.replaceAll(/[ ·]/g, "␣");

function isMatch(event) {
  const has = { query: event.queries[event.query], key: keysOf(event)[event.key] };
  return !matching || Object.entries(has).some(([of, id]) => matching.has(id) && (side.value === "both" || side.value === of));
}

// A point of the projection has one token.
const isPointMatch = ({ snippet, query }) => !matching || matching.has(snippet[query]);

function makeSearch() {
  if (!events) return;
  side.append(...Object.entries(SOUGHT).map(([value, words]) => element("option", { value }, words)));
  sought.addEventListener("input", search);
  side.addEventListener("change", search);
}

function search() {
  const text = spaced(sought.value);
  const ids = [...events.tokens.keys()].filter((id) => spaced(events.tokens[id]).includes(text));
  matching = text ? new Set(ids) : null;
  const numbers = new Map(heads.map((head) => [head, head.events?.snippets.filter(isMatch).length ?? 0]));
  const having = heads.filter((head) => matching && numbers.get(head)).sort((a, b) => numbers.get(b) - numbers.get(a));
  for (const head of heads) {
    for (const part of [head.button, head.point]) part.classList.toggle("unmatched", Boolean(matching) && !numbers.get(head));
  }
  byId("found").textContent = matching
    ? `${count(having.length, "head")} with an event whose ${SOUGHT[side.value]} contains it; ${count(ids.length, "token")} do.`
    : "";
  byId("found-heads").replaceChildren(...headLinks(having, (head) => ` (${numbers.get(head)})`));
  if (!headView.hidden && shown.head.events) {
    listEvents(shown.head);
    showProjection(shown.head);
  }
}
