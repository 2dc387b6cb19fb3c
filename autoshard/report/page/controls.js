// ---- its controls
(() => {
  const model = data.whatif, body = byId("whatif-body");
  const [batch, sequence, fresh] = model.sizes;
  const make = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    made.append(...children);
    return made;
  };
  const around = (base, least, most) => {
    const found = new Set([base]);
    for (let value = 1; value <= most; value *= 2) if (value >= least) found.add(value);
    return [...found].sort((a, b) => a - b);
  };
  const controls = make("div", {class: "controls"});
  const sliders = {};
  const slider = (id, label, list, base) => {
    const input = make("input", {type: "range", id: "w-" + id, min: 0, max: list.length - 1, step: 1, value: list.indexOf(base)});
    const output = make("output", {for: "w-" + id});
    sliders[id] = {input, output, list, base, get value() { return this.list[+input.value]; }};
    controls.append(make("div", {}, make("label", {for: "w-" + id}, label, " ", output), input));
    input.addEventListener("input", update);
  };
  if (model.vary[0]) slider("batch", "Batch", around(batch, model.least, Math.max(256, 8 * batch)), batch);
  if (model.vary[1]) slider("sequence", "Tokens per sequence", around(sequence, 16, Math.max(131072, 4 * sequence)), sequence);
  if (model.vary[2]) slider("new", "New tokens", around(fresh, 1, Math.max(16384, 4 * fresh)), fresh);
  const counts = [...Array(Math.max(16, 2 * model.devices)).keys()].map(i => i + 1);
  slider("count", "Devices", counts, model.devices);
  const kind = make("select", {id: "w-kind"}, make("option", {value: ""}, "as planned"));
  for (const row of model.hardware.slice(1)) kind.append(make("option", {value: row.name}, `${row.name}, ${formatBytes(row.memory)}`));
  kind.addEventListener("input", update);
  controls.append(make("div", {}, make("label", {for: "w-kind"}, "Hardware"), kind));
  const reset = make("button", {type: "button", id: "w-reset"}, "Back to the plan");
  reset.addEventListener("click", () => {
    for (const one of Object.values(sliders)) one.input.value = one.list.indexOf(one.base);
    kind.value = "";
    update();
  });
  const verdict = make("p", {class: "verdict", role: "status", id: "w-verdict"});
  const figures = make("dl", {class: "figures"}), rows = make("ul", {class: "lanes", id: "w-lanes"}), how = make("p", {class: "faint", id: "w-how"});
  body.append(controls, make("div", {class: "tools"}, reset), verdict, figures, how, rows);

  function figure(name, value, remark) {
    figures.append(make("div", {}, make("dt", {}, name), make("dd", {}, make("b", {}, value), make("span", {class: "faint"}, remark))));
  }

  function update() {
    for (const one of Object.values(sliders)) one.output.textContent = one.value.toLocaleString("en");
    const at = {batch: sliders.batch ? sliders.batch.value : batch, sequence: sliders.sequence ? sliders.sequence.value : sequence,
      fresh: sliders.new ? sliders.new.value : fresh};
    const anew = kind.value !== "" || sliders.count.value !== model.devices;
    const found = predict(model, at.batch, at.sequence, at.fresh, kind.value, anew ? sliders.count.value : 0);
    body.result = found;
    const base = predict(model, batch, sequence, fresh);
    const missing = found.devices.reduce((most, [, peak, memory]) => Math.max(most, peak - memory), 0);
    verdict.textContent = found.fits ? "Fits" : `Does not fit: the fullest device lacks ${formatBytes(missing)}`;
    verdict.className = "verdict " + (found.fits ? "good" : "bad");
    figures.replaceChildren();
    const ratio = found.latency / base.latency;
    figure(model.pass, formatSeconds(found.latency), Math.abs(ratio - 1) < 1e-9 ? "as planned" : `${ratio.toPrecision(3)} × the plan`);
    figure("Busiest device", formatSeconds(found.bottleneck), "");
    const fullest = found.devices.reduce((a, b) => b[1] / b[2] > a[1] / a[2] ? b : a);
    figure("Fullest device", `${Math.round(100 * fullest[1] / fullest[2])}%`, `${fullest[0]}, ${formatBytes(fullest[1])} of ${formatBytes(fullest[2])}`);
    if (!model.decodes && at.batch) {
      const tokens = at.batch * (at.sequence || 1) / found.latency;
      figure("Rate", tokens >= 1000 ? `${(tokens / 1000).toPrecision(3)} k` : tokens.toPrecision(3), at.sequence ? "tokens per second" : "samples per second");
    }
    const kept = !anew || keepsDivision(model, sliders.count.value, at.batch);
    const more = kept && sliders.count.value !== model.devices;
    how.textContent = more ? `With ${sliders.count.value} equal replicas, all devices of this kind, in one machine.`
      : kept ? model.words[0] + (anew ? " All devices are of this kind, in one machine." : "")
      : "Whole modules, in order, split anew so that the fullest device is as empty as it can be; devices of one machine." + model.words[1];
    if (model.guessed) how.textContent += " Some tensors grow as neither batch nor sequence does: they are taken in proportion.";
    rows.replaceChildren(...found.devices.map(([name, peak, memory, seconds]) => {
      const full = Math.max(memory, peak, 1), bar = make("div", {class: "bar", role: "img", "aria-label": `${name}: ${formatBytes(peak)} of ${formatBytes(memory)}`});
      const part = make("i", {style: `--c:${peak > memory ? "#b3261e" : "#3b7dd8"};width:${100 * peak / full}%`});
      if (peak > 0) bar.append(part);
      if (peak > memory) bar.append(make("u", {style: `left:${100 * memory / full}%`}));
      return make("li", {}, make("div", {class: "lane-head"}, make("b", {}, name)), bar, make("div", {class: "lane-tail" + (peak > memory ? " bad" : "")},
        peak > 0 ? `${formatBytes(peak)} of ${formatBytes(memory)}${seconds > 0 ? "; computes " + formatSeconds(seconds) : ""}` : `unused, ${formatBytes(memory)}`));
    }));
  }
  update();
})();
