// ---- other sizes: straight lines between the cells that were priced, said to be so, and nothing beyond them
(() => {
  const body = byId("sizes-between"), cells = data.cells, own = cells.find(cell => cell[6]);
  if (!body || !own) return;
  const make = (name, attributes, ...children) => {
    const made = document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    made.append(...children);
    return made;
  };
  const around = (list, value) => {
    const below = Math.max(...list.filter(one => one <= value)), above = Math.min(...list.filter(one => one >= value));
    return [below, above, above > below ? (value - below) / (above - below) : 0];
  };
  const mixed = (a, b, part) => a && b ? a.map((one, i) => one + part * (b[i] - one)) : null;
  function figures(column, batch, tokens) {
    const rows = cells.filter(cell => cell[0] === column);
    const at = (b, t) => { const cell = rows.find(one => one[1] === b && one[2] === t); return cell ? cell.slice(3, 6) : null; };
    const [b0, b1, b] = around(rows.map(cell => cell[1]), batch), [t0, t1, t] = around(rows.map(cell => cell[2]), tokens);
    const found = mixed(mixed(at(b0, t0), at(b1, t0), b), mixed(at(b0, t1), at(b1, t1), b), t);
    return found && {seconds: found[0], rate: found[1], full: found[2], priced: b === 0 && t === 0};
  }
  window.figuresOf = figures;
  const controls = make("div", {class: "controls"}), said = make("p", {role: "status", id: "sizes-said"}), inputs = {};
  for (const [id, label, value, varies] of [["batch", "Batch", own[1], 1], ["tokens", "Tokens per sequence", own[2], 2]]) {
    inputs[id] = make("input", {type: "number", id: "sizes-" + id, min: 1, value});
    if (new Set(cells.map(cell => cell[varies])).size > 1)
      controls.append(make("div", {}, make("label", {for: "sizes-" + id}, label), inputs[id]));
  }
  const column = make("select", {id: "sizes-column"}, ...[...new Set(cells.map(cell => cell[0]))].map(name => make("option", {}, name)));
  column.value = own[0];
  controls.append(make("div", {}, make("label", {for: "sizes-column"}, "Devices"), column));
  body.append(controls, said);
  function update() {
    const found = figures(column.value, +inputs.batch.value, +inputs.tokens.value), full = found && Math.round(100 * found.full);
    said.className = "verdict " + (!found ? "" : found.full > 1 ? "bad" : "good");
    said.textContent = !found ? "Not priced: the page has no cells around this size."
      : `${found.priced ? "Priced: " : "Interpolated between priced cells: about "}${formatSeconds(found.seconds)}, `
        + `${found.rate.toLocaleString("en", {maximumSignificantDigits: 3})} ${body.dataset.unit}, fullest device ${full}%`
        + (found.full > 1 ? ": does not fit" : "");
  }
  for (const one of [inputs.batch, inputs.tokens, column]) one.addEventListener("input", update);
  update();
})();
