// ---- what if: the formula is that of autoshard/report/whatif/predict.py, line by line
const BISECTIONS = 40;

function predict(data, batch, sequence, newTokens, kind = "", count = 0) {
  const values = monomials(data, batch, sequence, sequence + newTokens);
  if (!kind && !count && data.planned) return planned(data, values);
  const chosen = data.hardware.find(row => row.name === kind) || data.hardware[0];
  return splitAnew(data, values, chosen, count || data.devices);
}

const power = (base, exponent) => { let made = 1; for (let i = 0; i < exponent; i++) made *= base; return made; };
function monomials(data, batch, sequence, total) {
  return data.monomials.map(([i, j, k, many]) =>
    !many || batch > 1 ? power(batch, i) * power(sequence, j) * power(total, k) : 0);
}

function polynomial(terms, values) {
  let total = 0;
  for (let i = 0; i < terms.length; i += 2) total += terms[i + 1] * values[terms[i]];
  return total;
}

function largest(front, values) {
  let most = 0;
  for (const terms of front) most = Math.max(most, polynomial(terms, values));
  return most;
}

function opSeconds(data, values, device) {
  const amounts = data.table.map(terms => polynomial(terms, values));
  return data.ops.map(([flops, moved, dtype]) => {
    const busy = Math.max(amounts[flops] / device.flops[dtype], amounts[moved] / device.bandwidth);
    return amounts[flops] > 0 || amounts[moved] > 0 ? busy + device.launch : 0;
  });
}

function sumOf(counts, seconds) {
  let total = 0;
  for (let i = 0; i < counts.length; i += 2) total += seconds[counts[i]] * counts[i + 1];
  return total;
}

function planned(data, values) {
  const devices = [], incoming = data.planned.devices.map(() => 0);
  let latency = 0, bottleneck = 0, slowest = 0;
  for (const [target, delay, bandwidth, count, terms] of data.planned.transfers) {
    const seconds = count * delay + polynomial(terms, values) / bandwidth;
    incoming[target] += seconds;
    latency += seconds;
  }
  data.planned.devices.forEach((device, number) => {
    const seconds = sumOf(device.ops, opSeconds(data, values, device)) + device.optimizer / device.bandwidth;
    let peak = largest(device.front, values);
    peak = peak > 0 || device.always > 0 ? peak + device.always : 0;
    devices.push([device.name, peak, device.memory, seconds]);
    latency += seconds;
    bottleneck = Math.max(bottleneck, seconds + incoming[number]);
    slowest = Math.max(slowest, seconds);
  });
  if (data.planned.collectives !== null) {  // ranks work at the same time
    latency = slowest + collectives(data.planned.collectives, values);
    bottleneck = latency;
  }
  return result(devices, latency, bottleneck);
}

function collectives(rows, values) {
  let total = 0;
  for (const [count, ways, terms] of rows) {
    const nbytes = polynomial(terms, values);
    let best = Infinity;
    for (const lines of ways) {
      let slowest = 0;
      for (const [delay, perByte] of lines) slowest = Math.max(slowest, delay + perByte * nbytes);
      best = Math.min(best, slowest);
    }
    total += count * best;
  }
  return total;
}

function splitAnew(data, values, hardware, count) {
  const seconds = opSeconds(data, values, hardware);
  const kinds = data.units.kinds.map(unit => {
    const busy = sumOf(unit.ops, seconds) + unit.optimizer / hardware.bandwidth, [copies, terms] = unit.out;
    return [polynomial(unit.held, values), largest(unit.front, values), busy, copies, polynomial(terms, values)];
  });
  const order = data.units.order.map(number => kinds[number]);
  let low = 0, high = 0;
  for (const [held, transient, , , out] of order) {
    low = Math.max(low, held + transient);
    high += held + transient + out;
  }
  for (let i = 0; i < BISECTIONS; i++) {
    const middle = (low + high) / 2;
    if (packed(order, middle).length <= count) high = middle; else low = middle;
  }
  const devices = [], parts = packed(order, high);
  let latency = 0, bottleneck = 0;
  parts.forEach(([first, end], number) => {
    let held = 0, transient = 0, busy = 0, incoming = 0, came = 0;
    if (first > 0) {
      came = order[first - 1][4];
      incoming = order[first - 1][3] * hardware.delay + came / hardware.link;
    }
    for (const unit of order.slice(first, end)) {
      held += unit[0];
      transient = Math.max(transient, unit[1]);
      busy += unit[2];
    }
    devices.push([`device ${number}`, held + transient + came + hardware.overhead, hardware.memory, busy]);
    latency += busy + incoming;
    bottleneck = Math.max(bottleneck, busy + incoming);
  });
  for (let number = parts.length; number < count; number++) devices.push([`device ${number}`, 0, hardware.memory, 0]);
  return result(devices, latency, bottleneck);
}

function packed(order, limit) {
  const parts = [];
  let first = 0, held = 0, transient = 0, came = 0;
  order.forEach((unit, i) => {
    if (i > first && held + unit[0] + Math.max(transient, unit[1]) + came > limit) {
      parts.push([first, i]);
      first = i; held = 0; transient = 0; came = order[i - 1][4];
    }
    held += unit[0];
    transient = Math.max(transient, unit[1]);
  });
  parts.push([first, order.length]);
  return parts;
}

function result(devices, latency, bottleneck) {
  return {devices, latency, bottleneck, fits: devices.every(([, peak, memory]) => peak <= memory)};
}

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
  if (model.vary[0]) slider("batch", "Batch", around(batch, 1, Math.max(256, 8 * batch)), batch);
  if (model.vary[1]) slider("sequence", "Tokens per sequence", around(sequence, 16, Math.max(131072, 4 * sequence)), sequence);
  if (model.vary[2]) slider("new", "New tokens", around(fresh, 1, Math.max(16384, 4 * fresh)), fresh);
  const counts = [...Array(Math.max(16, 2 * model.devices)).keys()].map(i => i + 1);
  slider("count", "Devices", counts, model.devices);
  const kind = make("select", {id: "w-kind"}, make("option", {value: ""}, model.planned ? "as planned" : model.hardware[0].name));
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
    figure(model.pass, formatSeconds(found.latency), !model.planned ? `the plan at its own sizes: ${formatSeconds(model.latency)}`
      : Math.abs(ratio - 1) < 1e-9 ? "as planned" : `${ratio.toPrecision(3)} × the plan`);
    figure("Busiest device", formatSeconds(found.bottleneck), "");
    const fullest = found.devices.reduce((a, b) => b[1] / b[2] > a[1] / a[2] ? b : a);
    figure("Fullest device", `${Math.round(100 * fullest[1] / fullest[2])}%`, `${fullest[0]}, ${formatBytes(fullest[1])} of ${formatBytes(fullest[2])}`);
    if (!model.decodes && at.batch) {
      const tokens = at.batch * (at.sequence || 1) / found.latency;
      figure("Rate", tokens >= 1000 ? `${(tokens / 1000).toPrecision(3)} k` : tokens.toPrecision(3), at.sequence ? "tokens per second" : "samples per second");
    }
    how.textContent = !model.planned ? "This plan divides more than modules: micro-batches, replicas or streamed weights. That is not in these figures; `autoshard plan` gives it for other sizes. " : "";
    how.textContent += anew || !model.planned
      ? "Whole modules, in order, split anew so that the fullest device is as empty as it can be; devices of one machine."
      : data.whatif.planned.collectives ? "With the cuts that the plan makes." : "With the modules where the plan has them.";
    if (model.guessed) how.textContent += " Some tensors grow as neither batch nor sequence does: they are taken in proportion.";
    rows.replaceChildren(...found.devices.map(([name, peak, memory, seconds]) => {
      const full = Math.max(memory, peak, 1), bar = make("div", {class: "bar", role: "img", "aria-label": `${name}: ${formatBytes(peak)} of ${formatBytes(memory)}`});
      const part = make("i", {style: `--c:${peak > memory ? "#b3261e" : "#3b7dd8"};width:${100 * peak / full}%`});
      if (peak > 0) bar.append(part);
      if (peak > memory) bar.append(make("u", {style: `left:${100 * memory / full}%`}));
      return make("li", {}, make("div", {class: "lane-head"}, make("b", {}, name)), bar, make("div", {class: "lane-tail" + (peak > memory ? " bad" : "")},
        peak > 0 ? `${formatBytes(peak)} of ${formatBytes(memory)}; computes ${formatSeconds(seconds)}` : `unused, ${formatBytes(memory)}`));
    }));
  }
  update();
})();
