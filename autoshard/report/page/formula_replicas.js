
// ---- plans of replicas, as autoshard/report/whatif/formula_replicas.py
function replicated(plan, values, scale) {
  const size = plan.size * scale, count = plan.replicas.length;
  const devices = plan.names.map(([name, memory]) => [name, 0, memory, 0]);
  let slowest = 0, launching = 0, moving = 0, fastest = Infinity;
  const parts = rowsOf(size, count, plan.shares).map(rows => rows / size);
  const columns = parts.map(part => [...values, ...values.map(value => part * value)]);
  plan.replicas.forEach((number, index) => {
    const figures = plan.figures[number], rates = plan.rates[figures.rates];
    const own = opSeconds(plan, columns[index], rates);
    const busy = sumOf(figures.ops, own) + figures.optimizer / plan.over / rates.bandwidth;
    launching += launchesOf(figures.ops, own) * rates.launch;
    slowest = Math.max(slowest, busy);
    fastest = Math.min(fastest, busy);
    const place = plan.devices[index], device = devices[place];
    device[1] = replicaPeak(plan, figures, columns[index], parts[index]) + plan.names[place][2];
    device[3] = busy;
  });
  for (const [index, row] of plan.transfers) moving += copies(plan.links, [row], columns[index]);
  if (!plan.processes) slowest = Math.max(slowest, launching);
  const latency = slowest + exposed(plan, columns[0], fastest) + moving;
  return result(devices, latency, latency);
}

function resized(plan, hardware, count) {
  const link = [hardware.delay, hardware.link, 1];
  const port = [hardware.delay, hardware.link / Math.max(count - 1, 1), Math.max(count - 1, 1)];
  const [alone, first, adds, rest] = plan.others, numbers = [...Array(count).keys()];
  const replicas = numbers.map(index => index === 0 ? (count === 1 ? alone : first) : index % 2 === 1 && index + 1 < count ? adds : rest);
  let levels = 0;
  while (2 ** levels < count) levels++;
  const ring = (plan.sharded ? 1 : 2) * (count - 1);
  const ways = [[ring, ring / count, 0], [1, plan.sharded ? 1 / count : 1, 1]];
  if (!plan.sharded) ways.push([2 * levels, 2, 0]);
  return {
    ...plan,
    names: numbers.map(index => [`device ${index}`, hardware.memory, hardware.overhead]),
    devices: numbers,
    shares: [],
    replicas,
    over: plan.sharded ? count : 1,
    rates: plan.rates.map(() => hardware),
    links: [link, port],
    exchange: count > 1 ? plan.exchange.map(([times, , nbytes]) => [times, ["min", ...ways], nbytes]) : [],
    transfers: numbers.slice(1).flatMap(index => plan.moved.map(terms => [index, [0, 1, terms]])),
  };
}

function exposed(plan, columns, fastest) {
  if (!plan.exchange.length) return 0;
  let seconds = 0, first = 0;
  plan.exchange.forEach(([times, cost, nbytes], number) => {
    const one = secondsOf(plan.links, cost, nbytes);
    seconds += times * one;
    first = number === 0 ? one : first;
  });
  const total = polynomial(plan.flops[0], columns);
  const backward = total > 0 ? polynomial(plan.flops[1], columns) / total : 0.5;
  const hidden = plan.sharded ? fastest : plan.processes ? backward * fastest : 0;
  return first + Math.max(0, seconds - first - hidden);
}

function replicaPeak(plan, figures, columns, part) {
  const over = plan.over, whole = figures.gradient / over;
  let live = 0, cache = 0, gradient = 0;
  for (const moment of figures.moments) {
    let here = polynomial(moment[0], columns);
    if (plan.sharded) here += polynomial(moment[2], columns) / over;
    if (here > live) [live, cache, gradient] = [here, polynomial(moment[1], columns), polynomial(moment[2], columns)];
  }
  let used = live, transfer = 0;
  if (figures.stays) used = live - gradient + whole;
  if (figures.first) {
    const inputs = polynomial(figures.inputs, columns), outputs = polynomial(figures.outputs, columns);
    const [caches, largest] = figures.caches.map(one => polynomial(one, columns));
    transfer = (1 - part) * (inputs + (plan.training ? outputs : 0)) + (plan.training ? caches : 0);
    const after = polynomial(figures.after, columns) - part * (inputs + outputs) - cache;
    const merging = (plan.training ? Math.max(0, after) : 0) + inputs + 2 * outputs + caches + (1 - part) * largest;
    if (merging > used - cache + transfer) [used, transfer] = [merging + cache, 0];
  }
  const left = polynomial(figures.left, columns);
  if (figures.adding >= 0) used = Math.max(used, whole + left + figures.adding);
  if (figures.step >= 0 && whole + left + figures.step / over > used + transfer)
    [used, transfer] = [whole + left + figures.step / over, 0];
  return used + transfer + figures.divided / over + figures.buffer + figures.always;
}
