// ---- what if: the formula is that of autoshard/report/whatif/predict.py, line by line
const BISECTIONS = 40;

function predict(data, batch, sequence, newTokens, kind = "", count = 0) {
  const values = monomials(data, batch, sequence, sequence + newTokens);
  const chosen = data.hardware.find(row => row.name === kind) || data.hardware[0];
  let plan = data.planned;
  if (kind || count) {
    if (!keepsDivision(data, count, batch)) return splitAnew(data, values, chosen, count || data.devices);
    if (count && count !== data.devices) plan = resized(plan, chosen, count);
    else if (kind) plan = elsewhere(plan, chosen);
  }
  const scale = batch / data.sizes[0];
  if (plan.way === "stages") return staged(plan, values, scale);
  return plan.way === "replicas" ? replicated(plan, values, scale) : placed(data, plan, values);
}

function keepsDivision(data, count, batch) {
  const plan = data.planned;
  if (!count || count === data.devices) return plan.way !== "placed" || plan.stream !== undefined;
  return plan.way === "replicas" && count <= plan.size * batch / data.sizes[0];
}

function elsewhere(plan, hardware) {
  const links = plan.links.map(([delay, rate, shared]) =>
    shared > 0 ? [hardware.delay, hardware.link / shared, shared] : [delay, rate, shared]);
  if (plan.way === "ranks" || plan.way === "placed") {
    const devices = plan.devices.map(row => row.ops.length ? {...row, ...hardware, name: row.name} : row);
    return {...plan, links, devices};
  }
  const names = plan.names.map(([name]) => [name, hardware.memory, hardware.overhead]);
  return {...plan, links, names, rates: plan.rates.map(() => hardware)};
}

function placed(data, plan, whole) {
  const kinds = plan.table ? plan : data, values = [...whole, ...whole];
  const links = plan.links, devices = [], every = [], incoming = plan.devices.map(() => 0);
  let latency = 0, bottleneck = 0, slowest = 0;
  for (const [target, ...row] of plan.transfers) {
    const seconds = copies(links, [row], values);
    incoming[target] += seconds;
    latency += seconds;
  }
  plan.devices.forEach((device, number) => {
    const own = opSeconds(kinds, values, device);
    every.push(own);
    const seconds = sumOf(device.ops, own) + device.optimizer / device.bandwidth;
    let peak = largest(device.front, values);
    peak = peak > 0 || device.always > 0 ? peak + device.always + device.overhead : 0;
    devices.push([device.name, peak, device.memory, seconds]);
    latency += seconds;
    bottleneck = Math.max(bottleneck, seconds + incoming[number]);
    slowest = Math.max(slowest, device.stream ? streamed(device.stream, links, values, [own])[0] : seconds);
  });
  if (plan.collectives !== null) {  // ranks work at the same time
    latency = slowest + collectives(links, plan.collectives, values);
    bottleneck = latency;
  }
  if (plan.stream) {
    const [whole, busiest] = streamed(plan.stream, links, values, every);
    latency = whole;
    bottleneck = Math.max(bottleneck, busiest);
  }
  return result(devices, latency, bottleneck);
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
