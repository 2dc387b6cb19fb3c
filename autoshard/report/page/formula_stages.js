
// ---- plans with stages, as autoshard/report/whatif/formula_stages.py
const SUMS = ["inputs", "kept", "lasting", "outputs", "merged", "released", "returned", "leaving", "lent"];

function staged(plan, values, scale) {
  const [data, pipeline, tensor] = plan.mesh;
  const size = plan.size * scale, count = plan.microbatches;
  const rows = plan.size ? rowsOf(size, data, plan.shares) : plan.replicas.map(() => 0);
  const known = new Map();
  const replicas = plan.replicas.map((replica, index) => {
    const part = plan.size ? Math.ceil(rows[index] / count) / size : 1;
    const columns = [...values, ...values.map(value => part * value)];
    const ranks = replica.figures.map(number => {
      const key = part + " " + number;
      if (!known.has(key)) known.set(key, stageFigures(plan, plan.figures[number], columns));
      return known.get(key);
    });
    return oneReplica(plan, replica, ranks, columns);
  });
  const devices = plan.names.map(([name, memory]) => [name, 0, memory, 0]);
  let latency = 0, busiest = 0;
  for (let position = 0; position < pipeline; position++) {
    let ready = 0;
    for (const replica of replicas) ready = Math.max(ready, replica.done[position]);
    for (let rank = 0; rank < tensor; rank++) {
      let reduce = 0;
      if (plan.training) {
        const [buckets, cost, nbytes] = plan.reduce[position][rank];
        reduce = buckets * secondsOf(plan.links, cost, nbytes);
      }
      replicas.forEach((replica, number) => {
        const figures = replica.ranks[rank], step = figures.steps[position];
        const place = plan.replicas[number].devices[position][rank], device = devices[place];
        const waiting = replica.incoming[position] + count * replica.waiting[position] + reduce;
        device[1] = figures.peaks[position] + plan.names[place][2];
        device[3] = figures.busy[position] + step;
        const begin = reduce > 0 ? ready : replica.done[position];
        latency = Math.max(latency, begin + reduce + step);
        busiest = Math.max(busiest, device[3] + waiting);
      });
    }
  }
  for (const replica of replicas) latency = Math.max(latency, replica.issue);
  return result(devices, latency, Math.min(busiest, latency));
}

function stageFigures(plan, figures, columns) {
  const seconds = plan.rates.map(rates => opSeconds(plan, columns, rates));
  const pipeline = plan.mesh[1], count = plan.microbatches;
  const stages = [], busy = Array(pipeline).fill(0), peaks = [], steps = [];
  figures.stages.forEach((stage, number) => {
    const own = seconds[stage.rates], again = sumOf(stage.again, own);
    const forward = sumOf(stage.F, own), backward = sumOf(stage.B, own) + again;
    const launched = launchesOf(stage.F, own) + launchesOf(stage.B, own) + launchesOf(stage.again, own);
    stages.push({forward, backward, weight: sumOf(stage.W, own), launch: launched * plan.rates[stage.rates].launch});
    busy[number % pipeline] += count * (forward + (plan.training ? backward : 0));
  });
  const sizes = figures.stages.map(stage => stageBytes(stage, columns));
  for (let position = 0; position < pipeline; position++) {
    const device = plan.rates[figures.stages[position].rates], [temporary, moved] = figures.steps[position];
    peaks.push(stagePeak(plan, position, sizes, temporary) + figures.always[position]);
    steps.push(plan.training ? moved / device.bandwidth : 0);
  }
  return {stages, busy, peaks, steps};
}

function oneReplica(plan, replica, ranks, columns) {
  const pipeline = plan.mesh[1], links = plan.links, stages = [], waiting = Array(pipeline).fill(0);
  let issue = 0;
  plan.recompute.forEach((recompute, number) => {
    const together = collectives(links, replica.sums[number], columns);
    let back = collectives(links, replica.back_sums[number], columns);
    if (plan.training && recompute) back += together;
    let forward = 0, backward = 0, weight = 0;
    for (const rank of ranks) {
      forward = Math.max(forward, rank.stages[number].forward);
      backward = Math.max(backward, rank.stages[number].backward);
      weight = Math.max(weight, rank.stages[number].weight);
    }
    backward += back;
    stages.push([forward + together, backward, number === 0 ? backward : weight]);
    waiting[number % pipeline] += together + back;
    issue += ranks[0].stages[number].launch;
  });
  const sends = replica.sends.map(rows => copies(links, rows, columns));
  const returns = replica.returns.map(rows => copies(links, rows, columns));
  const [done, incoming] = byTheClock(plan, stages, sends, returns);
  for (const [holders, cost, nbytes] of replica.shared) {
    let begin = 0;
    for (const position of holders) begin = Math.max(begin, done[position]);
    if (holders.length > 1) for (const position of holders) done[position] = begin + secondsOf(links, cost, nbytes);
  }
  return {ranks, done, incoming, waiting, issue: plan.processes ? 0 : plan.microbatches * issue};
}

function byTheClock(plan, stages, sends, returns) {
  const pipeline = plan.mesh[1], count = stages.length;
  const free = Array(pipeline).fill(0), incoming = Array(pipeline).fill(0), link = Array(pipeline * pipeline).fill(0);
  const done = [0, 1, 2, 3].map(() => Array(count).fill(0));
  const come = [0, 1, 2].map(() => stages.map(() => Array(plan.microbatches).fill(0)));  // for F, B or I, and W
  for (const code of plan.program) {
    const way = Math.floor(code / count), stage = code % count;
    const device = stage % pipeline, needs = way === 0 ? 0 : way === 3 ? 2 : 1;
    const microbatch = done[way][stage]++;
    const [forward, backward, weight] = stages[stage];
    const seconds = way === 0 ? forward : way === 1 ? backward : way === 2 ? backward - weight : weight;
    let end = Math.max(free[device], come[needs][stage][microbatch]) + seconds;
    free[device] = end;
    if (way === 2) come[2][stage][microbatch] = end;
    const following = way === 0 ? stage + 1 : stage - 1;
    if (way === 3 || following < 0 || following === count) continue;
    const there = following % pipeline;
    if (there !== device) {
      const over = way === 0 ? sends[stage] : returns[following];
      end = Math.max(end, link[device * pipeline + there]) + over;
      link[device * pipeline + there] = end;
      incoming[there] += over;
    }
    come[needs][following][microbatch] = end;
  }
  return [free, incoming];
}

function stageBytes(stage, columns) {
  const found = {gradient: stage.gradient};
  if (!stage.forward) {
    for (const name of ["forward", "first", "back", ...SUMS]) found[name] = 0;
    return found;
  }
  found.forward = largest(stage.forward, columns);
  found.first = largest(stage.first, columns);
  found.back = largest(stage.back, columns);
  for (const name of SUMS) found[name] = polynomial(stage[name] || [], columns);
  if (stage.joined) {
    for (const name of ["first", "later", "last"]) found["joined " + name] = largest(stage.joined[name], columns);
    found.waiting = stage.joined.waiting;
    found.returning = polynomial(stage.joined.returning, columns);
  }
  return found;
}

function stagePeak(plan, position, sizes, temporary) {
  const pipeline = plan.mesh[1], count = sizes.length, microbatches = plan.microbatches;
  const row = plan.program.filter(code => code % count % pipeline === position);
  const last = Array(count).fill(-1), gone = Array(count).fill(0), made = Array(count).fill(false);
  const stepping = plan.training && !plan.joined;  // outputs of parts are put together after the last backward
  let end = -1, gradients = 0, there = 0, most = 0, always = 0, returned = 0, merged = 0, outputs = 0;
  row.forEach((code, index) => {
    if (code < count) { last[code] = index; end = index; }
  });
  for (let number = position; number < count; number += pipeline) {
    always += sizes[number].inputs;
    returned += microbatches * sizes[number].returned;
    merged += microbatches * sizes[number].merged;
    outputs += microbatches * sizes[number].outputs - sizes[number].lent;
  }
  row.forEach((code, index) => {
    const way = Math.floor(code / count), stage = code % count, nbytes = sizes[stage];
    if (way === 0) {
      most = Math.max(most, gradients + there + nbytes.forward);
      there += plan.training ? nbytes.kept : nbytes.lasting;
      if (last[stage] === index && nbytes.outputs > 0 && microbatches > 1 && !stepping) {
        most = Math.max(most, gradients + there + nbytes.outputs * microbatches);
        there += (nbytes.outputs - nbytes.released) * microbatches;
      }
      if (index === end) {
        there += returned;
        most = Math.max(most, gradients + there);
      }
      if (last[stage] === index && plan.joined) there -= nbytes.leaving * microbatches + nbytes.lent;
    } else if (plan.joined) {
      const final = gone[stage] === microbatches - 1, first = gone[stage] === 0;
      let reached = first ? nbytes["joined first"] - nbytes.waiting : 0;
      if (!first) reached = final ? nbytes["joined last"] : nbytes["joined later"];
      const coming = nbytes.returning * (microbatches - (final ? 1 : 0)), waiting = first ? nbytes.waiting : 0;
      most = Math.max(most, gradients + waiting + there - nbytes.kept + coming + reached);
      if (first || final) gradients += first ? nbytes.waiting : nbytes.gradient - nbytes.waiting;
      there -= nbytes.kept - nbytes.released - (nbytes.lasting - nbytes.outputs);
      gone[stage]++;
    } else {
      if (way !== 3) {
        most = Math.max(most, gradients + there - nbytes.kept + (made[stage] ? nbytes.back : nbytes.first));
        gradients += made[stage] ? 0 : nbytes.gradient;
        made[stage] = true;
      }
      if (way === 3 || way === 1) there -= nbytes.kept - nbytes.lasting;
    }
  });
  most = Math.max(most, gradients + 2 * merged);
  if (stepping && microbatches > 1) most = Math.max(most, gradients + there + outputs);
  if (plan.training) most = Math.max(most, gradients + there + temporary);
  return most + always;
}
