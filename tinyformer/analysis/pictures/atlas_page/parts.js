// Long texts: the view of a head shows a part of at most PART tokens of each axis, and where in the text it is.

const PART = 256;

const starts = { queries: byId("first-query"), keys: byId("first-key") };
const whole = byId("whole");

// The tokens of an axis that are shown.
const partOf = (axis) => ({ from: shown.from[axis], size: Math.min(PART, shown.head.kind[axis].length) });

function within(axis, token) {
  const { from, size } = partOf(axis);
  return Math.max(from, Math.min(token, from + size - 1));
}

function makeParts() {
  for (const [axis, input] of Object.entries(starts)) {
    input.addEventListener("change", () => moveTo({ [axis]: Number(input.value) }));
  }
  // The part around the pointer.
  const place = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = whole.getBoundingClientRect();
    const first = (axis, share) => share * shown.head.kind[axis].length - partOf(axis).size / 2;
    moveTo({
      queries: first("queries", (event.clientY - box.top) / box.height),
      keys: first("keys", (event.clientX - box.left) / box.width),
    });
  };
  for (const type of ["pointerdown", "pointermove"]) whole.addEventListener(type, place);
}

// Show the part that begins at a query and a key.
function moveTo(from) {
  for (const [axis, first] of Object.entries(from)) {
    const last = shown.head.kind[axis].length - partOf(axis).size;
    shown.from[axis] = Math.round(Math.max(0, Math.min(first, last)));
  }
  layOutPart();
  showHead(shown.head);
}

function showParts(head) {
  const { queries, keys } = head.kind;
  const longest = Math.max(queries.length, keys.length);
  byId("parts").hidden = longest <= PART;
  if (longest <= PART) return;
  for (const [axis, input] of Object.entries(starts)) {
    const { from, size } = partOf(axis);
    input.max = head.kind[axis].length - size;
    input.value = from;
    byId("part").style.setProperty(`--${axis}`, from / head.kind[axis].length);
    byId("part").style.setProperty(`--${axis}-size`, size / head.kind[axis].length);
  }
  const stride = Math.max(...[queries, keys].map(({ length }) => strideOf(length)));
  byId("parts-sentence").textContent =
    `The map, its lines and the text show at most ${PART} of ${longest.toLocaleString("en")} tokens at a time. ` +
    `The small map shows all of them${stride > 1 ? `, the strongest of ${stride} keys at every ${stride}th query` : ""}; ` +
    "click it to move there.";
  const canvas = whole.querySelector("canvas");
  const drawn = `${head.hash} ${hidesFirst}`; // decoding a long map takes time
  if (canvas.dataset.drawn === drawn) return;
  canvas.dataset.drawn = drawn;
  drawMap(canvas, head);
}
