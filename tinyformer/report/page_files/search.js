// Search by token, where the file has events: the heads by the number of their events whose query or key contains a text,
// and in a head only these.

const soughtSide = byId("sought-side");
let matching = null; // the indices of the tokens that contain the text; null without a text

const isMatch = (event) =>
  !matching ||
  (soughtSide.value !== "key" && matching.has(event.queries[event.query])) ||
  (soughtSide.value !== "query" && matching.has(keysOf(event)[event.key]));

function makeSearch() {
  byId("search").hidden = false;
  byId("sought").addEventListener("input", search);
  soughtSide.addEventListener("change", search);
}

function search() {
  const spaced = (text) => text.replaceAll(/[ ·]/g, "␣"); // a space may be typed as one, or as it is shown
  const text = spaced(byId("sought").value);
  const ids = [...events.tokens.keys()].filter((id) => spaced(events.tokens[id]).includes(text));
  matching = text ? new Set(ids) : null;
  const numbers = new Map(heads.map((head) => [head, head.events?.snippets.filter(isMatch).length ?? 0]));
  for (const [{ button, point }, number] of numbers) {
    for (const node of [button, point]) node.classList.toggle("unmatched", !number);
  }
  const having = heads.filter((head) => text && numbers.get(head)).sort((a, b) => numbers.get(b) - numbers.get(a));
  const words = `${count(having.length, "head")} with an event whose ${soughtSide.selectedOptions[0].text} contains it`;
  byId("found").textContent = text ? `${words}; ${count(ids.length, "token")} of the events' ${events.tokens.length} do.` : "";
  byId("found-heads").replaceChildren(...headLinks(having, (head) => ` (${numbers.get(head)})`));
  if (!headView.hidden) showEvents(shown.head);
}
