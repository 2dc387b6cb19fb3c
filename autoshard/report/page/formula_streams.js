
// ---- streamed modules, as autoshard/report/whatif/formula_streams.py
const SLOTS = 2, MOST_PASSES = 64;

function streamed(stream, links, values, seconds) {
  const count = seconds.length;
  const stretches = stream.segments.map(([ops, moved]) => {
    const own = Array(count).fill(0);
    for (const [device, counts] of ops) own[device] += sumOf(counts, seconds[device]);
    for (const [device, ...row] of moved) own[device] += copies(links, [row], values);
    return own;
  });
  const fetch = stream.modules.map(([, link, times, nbytes]) => times * links[link][0] + nbytes / links[link][1]);
  const latency = Math.max(least(stream, stretches, fetch, count), steady(stream, stretches, fetch, -1));
  let busiest = 0, disk = 0;
  for (let device = 0; device < count; device++)
    if (stream.modules.some(module => module[0] === device)) busiest = Math.max(busiest, steady(stream, stretches, fetch, device));
  for (const [, , module] of stream.calls) disk += stream.modules[module][4] > 0 ? fetch[module] : 0;
  return [latency, Math.max(busiest, disk)];
}

const on = (stretch, only) => only >= 0 ? stretch[only] : stretch.reduce((a, b) => a + b, 0);

function least(stream, stretches, fetch, count) {
  let computing = on(stretches[stream.tail], -1), disk = 0;
  const links = Array(count).fill(0);
  for (const [before, inside, module] of stream.calls) {
    computing += on(stretches[before], -1) + on(stretches[inside], -1);
    links[stream.modules[module][0]] += fetch[module];
    disk += stream.modules[module][4] > 0 ? fetch[module] : 0;
  }
  return Math.max(computing, disk, ...links);
}

function steady(stream, stretches, fetch, only) {
  const events = [];
  let gap = 0, unit = 0;
  for (const [before, inside, module] of stream.calls) {
    const device = stream.modules[module][0], disk = stream.modules[module][4];
    gap += on(stretches[before], only);
    unit += on(stretches[before], only) + on(stretches[inside], only);
    if ((only === -1 || only === device) && fetch[module] > 0) {
      events.push([gap, on(stretches[inside], only), device, fetch[module], disk]);
      unit += fetch[module];
      gap = 0;
    } else gap += on(stretches[inside], only);
  }
  const tail = gap + on(stretches[stream.tail], only);
  unit += on(stretches[stream.tail], only);
  if (!events.length) return tail;
  const following = [], mine = new Map();
  events.forEach((event, index) => mine.set(event[2], [...(mine.get(event[2]) || []), index]));
  for (const own of mine.values())
    own.forEach((index, place) => { following[index] = own[(place + SLOTS) % own.length]; });
  const ready = new Map(), link = new Map(), ends = [], seen = new Map();
  for (const device of mine.keys()) { ready.set(device, Array(SLOTS).fill(0)); link.set(device, 0); }
  let diskFree = 0, now = 0;
  for (let number = 0; number < MOST_PASSES; number++) {
    events.forEach(([before, inside, device], index) => {
      now = Math.max(now + before, ready.get(device).shift()) + inside;
      const [, , , seconds, disk] = events[following[index]];
      const start = disk > 0 ? Math.max(now, link.get(device), diskFree) : Math.max(now, link.get(device));
      link.set(device, start + seconds);
      if (disk > 0) diskFree = link.get(device);
      ready.get(device).push(link.get(device));
    });
    now += tail;
    ends.push(now);
    let state = "";
    for (const device of mine.keys())
      for (const time of [...ready.get(device), link.get(device), diskFree])
        state += Math.floor(Math.max(time - now, 0) / unit * 1e12 + 0.5) + ",";
    if (seen.has(state)) return (now - ends[seen.get(state)]) / (number - seen.get(state));
    seen.set(state, number);
  }
  const half = MOST_PASSES / 2;
  return (ends[ends.length - 1] - ends[half - 1]) / half;
}
