// A second head of the same kind, whose map, lines and numbers stand beside those of the head that is open.

const otherChoice = byId("other");

function makeComparison() {
  otherChoice.addEventListener("change", () => {
    shown.other = ofKind(shown.head.kind)[otherChoice.value] ?? null;
    showHead(shown.head);
  });
}

// The heads of a kind to choose from; another kind has other tokens, so the choice ends.
function listOthers(kind) {
  const options = ofKind(kind).map((head, index) => element("option", { value: index }, head.title));
  otherChoice.replaceChildren(element("option", { value: "" }, "no head"), ...options);
  byId("comparison").hidden = options.length < 2;
  shown.other = null;
}

// The heads whose maps and lines are drawn, the open one first.
const drawnHeads = () => [shown.head, shown.other].filter(Boolean);

function showOther() {
  const { head, other } = shown;
  for (const part of document.querySelectorAll('[data-needs="other"]')) part.hidden = !other;
  for (const part of [".head-body", ".map"]) document.querySelector(part).classList.toggle("comparing", Boolean(other));
  if (!other) return;
  byId("map-title").textContent = capitalised(head.title);
  byId("other-title").textContent = capitalised(other.title);
  for (const column of document.querySelectorAll("th.other")) column.textContent = other.title;
  byId("other-keys").replaceChildren(
    ...[...labels.keys].map(({ textContent: token }) => element("span", { class: "token" }, element("span", {}, token))),
  );
  byId("other-keys").classList.toggle("upright", byId("keys").classList.contains("upright"));
  byId("other-cells").classList.toggle("ablated", other.ablated);
  drawMap(byId("other-map"), other, partOf("queries"), partOf("keys"));
}

// The cell of the other head in a row of a table, if there is one.
const otherCell = (text) => (shown.other ? [element("td", { class: "number other" }, text)] : []);
