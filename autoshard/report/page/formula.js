// ---- what if: what all formulas are made of, as autoshard/report/whatif/formula.py, line by line
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

function launchesOf(counts, seconds) {
  let total = 0;
  for (let i = 0; i < counts.length; i += 2) total += seconds[counts[i]] > 0 ? counts[i + 1] : 0;
  return total;
}

function secondsOf(links, cost, nbytes) {
  if (typeof cost[0] !== "string") {
    const [times, part, link] = cost;
    return times * links[link][0] + part * nbytes / links[link][1];
  }
  const parts = cost.slice(1).map(one => secondsOf(links, one, nbytes));
  if (!parts.length) return 0;
  return cost[0] === "max" ? Math.max(...parts) : cost[0] === "min" ? Math.min(...parts) : parts.reduce((a, b) => a + b, 0);
}

function collectives(links, rows, values) {
  let total = 0;
  for (const [count, cost, terms] of rows) total += count * secondsOf(links, cost, polynomial(terms, values));
  return total;
}

function copies(links, rows, values) {
  let total = 0;
  for (const [link, count, terms] of rows) total += count * links[link][0] + polynomial(terms, values) / links[link][1];
  return total;
}

function rowsOf(size, count, shares) {
  const found = [];
  if (!shares.length) {
    for (let rank = 0; rank < count; rank++) found.push(Math.floor(size / count) + (rank < size % count ? 1 : 0));
    return found;
  }
  const all = shares.reduce((a, b) => a + b, 0);
  for (const share of shares) found.push(Math.floor(size * share / all));
  const left = size - found.reduce((a, b) => a + b, 0), lack = rank => size * shares[rank] % all;
  const lacking = shares.map((share, rank) => rank).sort((a, b) => lack(b) - lack(a) || a - b);
  for (const rank of lacking.slice(0, left)) found[rank]++;
  while (found.includes(0) && Math.max(...found) > 1) {
    found[found.indexOf(Math.max(...found))]--;
    found[found.indexOf(0)]++;
  }
  return found;
}

function result(devices, latency, bottleneck) {
  return {devices, latency, bottleneck, fits: devices.every(([, peak, memory]) => peak <= memory)};
}
