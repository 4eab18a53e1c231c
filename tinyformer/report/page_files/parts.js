// Long texts: the view of a head shows a part of at most PART tokens of each axis, and where in the text it is.

const PART = 256;
const starts = { queries: byId("first-query"), keys: byId("first-key") };
const whole = byId("whole");

// The tokens of an axis that are shown.
const partOf = (axis) => ({ from: shown.from[axis], size: Math.min(PART, shown.head.kind[axis].length) });
const within = (axis, token) => clamped(token, shown.from[axis], shown.from[axis] + partOf(axis).size - 1);

function makeParts() {
  for (const [axis, input] of Object.entries(starts)) {
    input.addEventListener("change", () => moveTo({ [axis]: Number(input.value) }));
  }
  // The part around the pointer.
  const place = (event) => {
    const [across, down] = sharesOf(event, whole.getBoundingClientRect());
    const first = (axis, share) => share * shown.head.kind[axis].length - partOf(axis).size / 2;
    if (event.buttons) moveTo({ queries: first("queries", down), keys: first("keys", across) });
  };
  for (const type of ["pointerdown", "pointermove"]) whole.addEventListener(type, place);
}

// Show the part that begins at a query and a key.
function moveTo(from) {
  for (const [axis, first] of Object.entries(from)) {
    shown.from[axis] = Math.round(clamped(first, 0, shown.head.kind[axis].length - partOf(axis).size));
  }
  layOutPart();
  showHead(shown.head);
}

function showParts(head) {
  const longest = Math.max(head.kind.queries.length, head.kind.keys.length);
  byId("parts").hidden = longest <= PART;
  if (longest <= PART) return;
  for (const [axis, input] of Object.entries(starts)) {
    const [{ from, size }, { length }] = [partOf(axis), head.kind[axis]];
    Object.assign(input, { max: length - size, value: from });
    byId("part").style.setProperty(`--${axis}`, from / length);
    byId("part").style.setProperty(`--${axis}-size`, size / length);
  }
  const stride = strideOf(longest);
  byId("parts-sentence").textContent =
    `The map, its lines and the text show at most ${PART} of ${longest.toLocaleString("en")} tokens at a time. ` +
    `The small map shows all${stride > 1 ? `, as the strongest of ${stride} keys at one query of ${stride}` : ""}; click it to move.`;
  const canvas = whole.querySelector("canvas");
  const drawn = `${head.hash} ${hidesFirst}`; // decoding a long map takes time
  if (canvas.dataset.drawn === drawn) return;
  canvas.dataset.drawn = drawn;
  drawMap(canvas, head);
}
