// Shows the snapshots of a running copy or server. It only reads: /events, one snapshot a second.
'use strict';

const SAMPLES_MAX = 7200;
// Distances of the marks on a time axis.
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];
const KINDS = ['data', 'zero', 'resumed', 'verified'];
const KIND_NAMES = {
  data: 'Data', zero: 'Zeroes', resumed: 'Copied by an earlier run', verified: 'Verified',
};
const BOTTLENECKS = {
  source: 'The source', target: 'The target', both: 'Both sides', rate: 'The option --rate',
};
const $ = id => document.getElementById(id);

const page = {
  last: null, // the newest snapshot
  samples: [], // { at, rates, latencies }
  moved: new Map(), // bytes per second of each export: { read, write }
  range: 600, // seconds shown in the charts; 0: all
  charts: [],
  cell: null, // the selected cell of the map
  ended: false,
  announced: '',
};

// Formats.

function bytes(count) {
  let value = count;
  for (const unit of ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB']) {
    if (value < 1024) return `${value.toFixed(unit === 'B' || value >= 100 ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} EiB`;
}

const rate = perSecond => `${bytes(perSecond)}/s`;

function duration(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  const whole = Math.floor(seconds);
  const two = number => String(number).padStart(2, '0');
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

// An hour of a day, with the day if that is another one than today.
function hour(seconds) {
  const at = new Date(seconds * 1000);
  const time = at.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? time : `${at.toLocaleDateString([], { day: 'numeric', month: 'short' })}, ${time}`;
}

// The hour at which something ends that takes this many seconds more.
const hourIn = seconds => (seconds === null || seconds === undefined ? '–' : hour(Date.now() / 1000 + seconds));

function latency(seconds) {
  if (seconds === null) return '–';
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(1)} ms` : `${seconds.toFixed(2)} s`;
}

const count = number => number.toLocaleString('en-US');
const share = (part, all) => (all > 0 ? Math.min(1, part / all) : 0);
const sum = numbers => numbers.reduce((all, number) => all + number, 0);

// Elements.

function set(element, text) {
  // Text that stays the same is not read out again.
  if (element.textContent !== text) element.textContent = text;
}

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// Gives `parent` a child for each item with a key; `create` makes one, `update` fills it.
function keyed(parent, items, key, create, update) {
  const known = new Map([...parent.children].map(child => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = String(key(item));
    let child = known.get(name);
    known.delete(name);
    if (!child) {
      child = create(item);
      child.dataset.key = name;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] || null);
    update(child, item);
  });
  known.forEach(child => child.remove());
}

// Makes rows of the table with this body. On a phone, each cell shows the name of its column.
const rows = (id, classes) => () => {
  const row = document.createElement('tr');
  const names = $(id).closest('table').tHead.rows[0].cells;
  classes.forEach((name, index) => {
    const cell = make(index ? 'td' : 'th', { className: name });
    if (index) cell.dataset.label = names[index].textContent;
    else cell.scope = 'row';
    row.append(cell);
  });
  return row;
};

// Snapshots.

const side = (snapshot, name) => {
  const { seconds, classes } = snapshot.latency[name];
  return { seconds, requests: sum(classes) };
};

// The two kinds of requests whose latency is shown.
const sides = snapshot => (snapshot.command === 'serve' ? ['read', 'write'] : ['source', 'target']);

// Mean latency of the requests between two snapshots, in seconds; null without any.
function meanBetween(before, now, name) {
  const [old, fresh] = [side(before, name), side(now, name)];
  const requests = fresh.requests - old.requests;
  return requests > 0 ? (fresh.seconds - old.seconds) / requests : null;
}

// Counters whose rates are shown, in the order of the lines.
const counters = snapshot => (snapshot.command === 'serve'
  ? [snapshot.bytes.read, snapshot.bytes.write]
  : [snapshot.done, snapshot.data, snapshot.verified]);

function sampleBetween(before, now) {
  const seconds = now.elapsed - before.elapsed;
  if (!(seconds > 0)) return null;
  const earlier = counters(before);
  return {
    at: Date.now() / 1000,
    rates: counters(now).map((count, index) => Math.max(0, count - earlier[index]) / seconds),
    latencies: sides(now).map(name => meanBetween(before, now, name)),
  };
}

function keepExportRates(before, now) {
  const seconds = now.elapsed - before.elapsed;
  const earlier = new Map((before.exports || []).map(one => [one.name, one.bytes]));
  page.moved = new Map(now.exports.map(({ name, bytes }) => {
    const old = earlier.get(name) || bytes;
    const each = kind => Math.max(0, (bytes[kind] || 0) - (old[kind] || 0)) / seconds;
    return [name, { read: each('read'), write: each('write') }];
  }));
}

function keep(snapshot) {
  const before = page.last;
  page.last = snapshot;
  if (!before) return;
  const sample = sampleBetween(before, snapshot);
  if (!sample) return;
  if (snapshot.exports) keepExportRates(before, snapshot);
  page.samples.push(sample);
  if (page.samples.length > SAMPLES_MAX) {
    // The older half in half the resolution.
    const half = SAMPLES_MAX / 2;
    page.samples = page.samples.filter((_, index) => index >= half || index % 2);
  }
}

// The newest value of a line; null before the first.
const newest = (kind, index) => {
  const last = page.samples[page.samples.length - 1];
  return last ? last[kind][index] : null;
};

// The map.

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function drawMap(canvas, map, selected = null) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
  if (!width || !height) return;
  if (canvas.width !== Math.round(width)) canvas.width = Math.round(width);
  if (canvas.height !== Math.round(height)) canvas.height = Math.round(height);
  const context = canvas.getContext('2d');
  context.clearRect(0, 0, canvas.width, canvas.height);
  const total = map.data.length;
  const x = index => Math.round((index * canvas.width) / total);
  const strip = Math.max(2, Math.round(canvas.height / 8));
  const colours = Object.fromEntries(KINDS.map(kind => [kind, colour(kind)]));
  for (let index = 0; index < total; index++) {
    const [left, right] = [x(index), Math.max(x(index) + 1, x(index + 1))];
    const parts = ['data', 'zero', 'resumed'].map(kind => [kind, Number(map[kind][index])]);
    // Rounded digits may exceed the whole.
    const most = Math.max(9, sum(parts.map(part => part[1])));
    let bottom = canvas.height;
    for (const [kind, digit] of parts) {
      const top = bottom - (digit * canvas.height) / most;
      context.fillStyle = colours[kind];
      context.fillRect(left, Math.floor(top), right - left, Math.ceil(bottom) - Math.floor(top));
      bottom = top;
    }
    const verified = Number(map.verified[index]);
    if (verified) {
      context.fillStyle = colours.verified;
      context.globalAlpha = 0.25 + (0.75 * verified) / 9;
      context.fillRect(left, canvas.height - strip, right - left, strip);
      context.globalAlpha = 1;
    }
  }
  if (selected !== null) {
    context.strokeStyle = colour('text');
    context.lineWidth = 2 * scale;
    const wide = Math.max(6 * scale, x(selected + 1) - x(selected));
    context.strokeRect(x(selected) - wide / 4, scale, wide, canvas.height - 2 * scale);
  }
}

function describeCell() {
  const map = page.last && page.last.map;
  if (!map || page.cell === null) return set($('map-cell'), '');
  const start = page.cell * map.cell_bytes;
  const end = Math.min(map.size, start + map.cell_bytes);
  const parts = KINDS.filter(kind => map[kind][page.cell] !== '0')
    .map(kind => `${KIND_NAMES[kind].toLowerCase()} ${Math.round(Number(map[kind][page.cell]) * 100 / 9)} %`);
  set($('map-cell'), `${bytes(start)} to ${bytes(end)}: ${parts.join(', ') || 'not copied'}`);
}

function selectCell(index) {
  const map = page.last && page.last.map;
  if (!map) return;
  page.cell = Math.max(0, Math.min(map.data.length - 1, index));
  describeCell();
  drawMap($('map'), map, page.cell);
}

function legend(list, amounts) {
  const kinds = KINDS.filter(kind => !amounts || amounts[kind] > 0 || kind === 'data');
  keyed(list, kinds, kind => kind, kind => make('li', {}, make('span', { className: `swatch ${kind}` }), make('span')),
    (item, kind) => set(item.lastChild, amounts ? `${KIND_NAMES[kind]}: ${bytes(amounts[kind])}` : KIND_NAMES[kind]));
}

function showMap(snapshot) {
  $('map-section').hidden = !snapshot.map;
  if (!snapshot.map) return;
  const zero = snapshot.zeroed + snapshot.skipped;
  const { data, resumed, verified } = snapshot;
  legend($('legend'), { data, zero, resumed, verified });
  const percent = Math.floor(100 * share(snapshot.done, snapshot.total));
  $('map').setAttribute('aria-label', `Map of the disk, ${percent} percent done`);
  drawMap($('map'), snapshot.map, page.cell);
  describeCell();
}

// Charts.

function options(names, format, width, increments) {
  const axis = { stroke: colour('quiet'), grid: { stroke: colour('grid'), width: 1 }, ticks: { show: false } };
  const clock = seconds => new Date(seconds * 1000).toTimeString().slice(0, 8);
  const colours = [colour('data'), colour('second'), colour('verified')];
  const dashes = [undefined, [6, 3], [2, 3]];
  const line = (label, index) => ({
    label, stroke: colours[index], width: 2, spanGaps: true, points: { show: false }, dash: dashes[index],
    value: (plot, value, series, index) => shown(plot, value, series, index, format),
  });
  // Without a cursor, the newest value.
  const shown = (plot, value, series, index, text) => {
    const values = plot.data[series];
    const found = index === null || index === undefined ? values[values.length - 1] : value;
    return found === null || found === undefined ? '–' : text(found);
  };
  return {
    width, height: 210, cursor: { points: { size: 6 } },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, values: (_, splits) => splits.map(clock), space: 80, size: 30, incrs: SECONDS },
      { ...axis, values: (_, splits) => splits.map(format), size: 78, incrs: increments },
    ],
    series: [{ label: 'Time', value: (plot, value, series, index) => shown(plot, value, series, index, clock) }, ...names.map(line)],
  };
}

function chartData(kind) {
  const newestAt = page.samples.length ? page.samples[page.samples.length - 1].at : 0;
  const shown = page.samples.filter(sample => !page.range || sample.at >= newestAt - page.range);
  const lines = page.samples[0][kind].map((_, index) => shown.map(sample => sample[kind][index]));
  return [shown.map(sample => sample.at), ...lines];
}

function makeCharts() {
  page.charts.forEach(({ plot }) => plot.destroy());
  const serve = page.last.command === 'serve';
  const binary = Array.from({ length: 60 }, (_, power) => 2 ** power);
  page.charts = [
    { id: 'rate-chart', kind: 'rates', names: serve ? ['Read', 'Written'] : ['Copied', 'Data', 'Verified'], format: rate, increments: binary },
    { id: 'latency-chart', kind: 'latencies', names: serve ? ['Read', 'Write'] : ['Source', 'Target'], format: latency },
  ].map(({ id, kind, names, format, increments }) => {
    const parent = $(id);
    const plot = new uPlot(options(names, format, parent.clientWidth, increments), chartData(kind), parent);
    return { plot, parent, kind };
  });
}

function showCharts() {
  $('charts-section').hidden = false;
  // A line needs two points.
  $('charts').hidden = page.samples.length < 2;
  $('charts-wait').hidden = !$('charts').hidden || page.ended;
  if ($('charts').hidden) return;
  if (!page.charts.length) return makeCharts();
  page.charts.forEach(({ plot, kind }) => plot.setData(chartData(kind)));
}

function resize() {
  page.charts.forEach(({ plot, parent }) => {
    if (parent.clientWidth !== plot.width) plot.setSize({ width: parent.clientWidth, height: 210 });
  });
  if (page.last) showMaps(page.last);
}

// Copies.

function copyFigures(snapshot) {
  const { source, target } = snapshot.retries;
  const { latency: times } = snapshot;
  const each = name => {
    const { seconds } = side(snapshot, name);
    return [`Time of all requests to the ${name}, seconds`, latency(seconds), seconds, `latency.${name}.seconds`];
  };
  const figures = [
    ['Done', bytes(snapshot.done), snapshot.done, 'done'],
    ['Size', bytes(snapshot.total), snapshot.total, 'total'],
    ['Written as data', bytes(snapshot.data), snapshot.data, 'data'],
    ['Zeroed on the target', bytes(snapshot.zeroed), snapshot.zeroed, 'zeroed'],
    ['Zero on the target before', bytes(snapshot.skipped), snapshot.skipped, 'skipped'],
    ['Copied by an earlier run', bytes(snapshot.resumed), snapshot.resumed, 'resumed'],
    ['Verified', bytes(snapshot.verified), snapshot.verified, 'verified'],
    ['Connections to each side', count(snapshot.connections), snapshot.connections, 'connections'],
    ['Requests in flight', count(snapshot.in_flight), snapshot.in_flight, 'in_flight'],
    ['Request size', bytes(snapshot.request_size), snapshot.request_size, 'request_size'],
    ['Retried requests to the source', count(source), source, 'retries.source'],
    ['Retried requests to the target', count(target), target, 'retries.target'],
    ['Replaced connections to the source', count(snapshot.reconnects.source), snapshot.reconnects.source, 'reconnects.source'],
    ['Replaced connections to the target', count(snapshot.reconnects.target), snapshot.reconnects.target, 'reconnects.target'],
    ...Object.keys(times).filter(name => name !== 'bounds').map(each),
  ];
  const routes = Object.entries(snapshot.routes);
  return figures.concat(routes.map(([name, moved]) => [`Route: ${name.replaceAll('_', ' ')}`, bytes(moved), moved, `routes.${name}`]));
}

const failed = snapshot => snapshot.finished && !snapshot.success;

// The rate of data first, which a limit applies to; holes go faster.
const runningRates = snapshot => [
  ['Data', rate(snapshot.data_rate)],
  ...(snapshot.rate > snapshot.data_rate * 1.05 ? [['Data and holes', rate(snapshot.rate)]] : []),
];

function copyTiles(snapshot) {
  const retries = snapshot.retries.source + snapshot.retries.target;
  const average = snapshot.elapsed > 0 ? snapshot.done / snapshot.elapsed : 0;
  const tiles = [
    ['Done', snapshot.total ? `${bytes(snapshot.done)} of ${bytes(snapshot.total)}` : bytes(snapshot.done)],
    ...(snapshot.finished ? [['Average rate', rate(average)]] : runningRates(snapshot)),
    ['Elapsed', duration(snapshot.elapsed)],
  ];
  if (snapshot.finished) tiles.push(['Ended', hour(snapshot.end_time)]);
  else tiles.push(['Remaining', duration(snapshot.eta)], ['Ends', hourIn(snapshot.eta)]);
  if (!failed(snapshot)) tiles.push(['Limited by', BOTTLENECKS[snapshot.bottleneck] || '–']);
  if (!snapshot.finished) {
    tiles.push(['Latency, source', latency(newest('latencies', 0))], ['Latency, target', latency(newest('latencies', 1))]);
  }
  tiles.push(['Retries', count(retries)]);
  if (snapshot.disks) {
    const complete = snapshot.disks.filter(disk => disk.state === 'complete').length;
    tiles.unshift(['Disks', `${complete} of ${snapshot.disks.length} complete`]);
  }
  return tiles;
}

function copyState(snapshot) {
  if (snapshot.finished) return snapshot.success ? ['complete', 'complete'] : ['failed', 'failed'];
  const phases = {verify: 'verifying', prepare: 'preparing the target'};
  return ['running', phases[snapshot.phase] || 'copying'];
}

function showDisks(snapshot) {
  $('disks-section').hidden = !snapshot.disks;
  if (!snapshot.disks) return;
  const create = () => {
    const row = rows('disks', ['', '', 'wide', 'number', 'number'])();
    const canvas = make('canvas', { className: 'map' });
    canvas.setAttribute('aria-hidden', 'true');
    row.children[2].append(canvas);
    row.children[1].append(make('span'), make('span', { className: 'error' }));
    row.children[0].append(make('span'), make('span', { className: 'quiet small' }));
    return row;
  };
  keyed($('disks'), snapshot.disks, disk => disk.name, create, (row, disk) => {
    const [name, state, map, done, size] = row.children;
    set(name.firstChild, disk.name);
    set(name.lastChild, ` ${disk.source} → ${disk.target}`);
    set(state.firstChild, disk.state === 'running' && disk.phase === 'verify' ? 'verifying' : disk.state);
    set(state.lastChild, disk.error || '');
    // A disk that has failed is not done, whatever was copied.
    const known = disk.total && disk.state !== 'failed';
    set(done, known ? `${Math.floor(100 * share(disk.done, disk.total))} %` : '–');
    set(size, bytes(disk.total));
    if (disk.map) drawMap(map.firstChild, disk.map);
  });
  legend($('disks-legend'), null);
}

function showMaps(snapshot) {
  showMap(snapshot);
  if (snapshot.command === 'copy') showDisks(snapshot);
}

function showCopy(snapshot) {
  const part = snapshot.phase === 'verify' ? snapshot.verified : snapshot.done;
  const done = snapshot.finished && snapshot.success ? 1 : share(part, snapshot.total);
  $('progress-row').hidden = !snapshot.total && !snapshot.finished;
  $('progress').value = done;
  $('progress').className = failed(snapshot) ? 'failed' : '';
  const percent = `${Math.floor(done * 100)} %`;
  set($('percent'), percent);
  set($('ends'), snapshot.source ? `${snapshot.source} → ${snapshot.target}` : `${snapshot.disks.length} disks`);
  const [state, text] = copyState(snapshot);
  document.title = `${snapshot.finished ? text : percent} – blockhaul copy`;
  showMaps(snapshot);
  const tens = Math.floor(done * 10) * 10;
  announce(snapshot.finished ? endText(snapshot) : `${text}, ${tens} percent`);
  return [state, text];
}

// Servers.

function serveFigures(snapshot) {
  const kinds = Object.keys(snapshot.requests);
  const requests = kinds.map(kind => [`Requests: ${kind}`, count(snapshot.requests[kind]), snapshot.requests[kind], `requests.${kind}`]);
  const moved = ['read', 'write'].map(kind => [`Bytes: ${kind}`, bytes(snapshot.bytes[kind]), snapshot.bytes[kind], `bytes.${kind}`]);
  return [
    ['Connections', count(snapshot.connections), snapshot.connections, 'connections'],
    ['Connections in their handshake', count(snapshot.handshakes), snapshot.handshakes, 'handshakes'],
    ['Connections accepted', count(snapshot.accepted), snapshot.accepted, 'accepted'],
    ['Connections refused', count(snapshot.refused), snapshot.refused, 'refused'],
    ['Failed handshakes', count(snapshot.handshakes_failed), snapshot.handshakes_failed, 'handshakes_failed'],
    ['Requests in flight', count(snapshot.in_flight), snapshot.in_flight, 'in_flight'],
    ['Failed requests', count(snapshot.errors), snapshot.errors, 'errors'],
    ['Memory for requests', bytes(snapshot.memory), snapshot.memory, 'memory'],
    ['Memory limit', bytes(snapshot.memory_limit), snapshot.memory_limit, 'memory_limit'],
    ...moved, ...requests,
  ];
}

function serveTiles(snapshot) {
  const running = snapshot.jobs.filter(job => job.end_time === null && job.state !== 'interrupted').length;
  return [
    ['Connections', count(snapshot.connections)], ['Jobs', `${count(running)} running`],
    ['Read', rate(newest('rates', 0) || 0)], ['Written', rate(newest('rates', 1) || 0)],
    ['Latency, read', latency(newest('latencies', 0))], ['Latency, write', latency(newest('latencies', 1))],
    ['In flight', count(snapshot.in_flight)], ['Errors', count(snapshot.errors)],
    ['Up for', duration(snapshot.elapsed)],
  ];
}

function showClients(snapshot) {
  $('clients-section').hidden = false;
  const classes = ['', '', 'number', 'number', 'number', 'number', 'number', 'number'];
  const clients = snapshot.clients;
  keyed($('clients'), clients, client => client.number, rows('clients', classes), (row, client) => {
    const tls = client.tls ? ` (${client.tls.version}${client.tls.name ? `, ${client.tls.name}` : ''})` : '';
    const values = [
      `${client.number}: ${client.address}${tls}`,
      client.export === null ? 'handshake' : client.export || '(default)',
      bytes(client.bytes.read), bytes(client.bytes.write), count(sum(Object.values(client.requests))),
      count(client.in_flight), count(client.errors), duration(client.age),
    ];
    values.forEach((value, index) => set(row.children[index], value));
  });
  const more = snapshot.connections - clients.length;
  const none = clients.length ? '' : 'No client is connected.';
  set($('clients-more'), more > 0 && clients.length ? `${count(more)} more are not shown.` : none);
}

function showExports(snapshot) {
  $('exports-section').hidden = false;
  const create = () => {
    const row = rows('exports', ['', '', 'number', '', 'number', 'number', 'number'])();
    row.children[1].append(make('span'), make('span', { className: 'quiet small' }));
    return row;
  };
  keyed($('exports'), snapshot.exports, one => one.name, create, (row, one) => {
    const [name, device, ...others] = row.children;
    set(name, one.name || '(default)');
    set(device.firstChild, one.device);
    set(device.lastChild, one.layers.length ? ` behind ${one.layers.join(', ')}` : '');
    const moved = page.moved.get(one.name) || { read: 0, write: 0 };
    const mode = one.readonly === null ? 'one device each' : one.readonly ? 'read-only' : 'read-write';
    const values = [
      one.size === null ? '–' : bytes(one.size), `${mode}, ${snapshot.tls}`,
      rate(moved.read), rate(moved.write), count(one.clients),
    ];
    values.forEach((value, index) => set(others[index], value));
  });
  const more = snapshot.exports_count - snapshot.exports.length;
  set($('exports-more'), more > 0 ? `${count(more)} more are not shown.` : '');
}

const JOB_FAILED = ['failed', 'interrupted'];

// The time that a job has taken, and the hour at which it ends or ended.
function jobTime(job) {
  if (job.end_time) return `${duration(job.seconds)}, ended ${hour(job.end_time)}`;
  const done = share(job.done, job.total);
  if (job.state !== 'running' || !(done > 0)) return duration(job.seconds);
  return `${duration(job.seconds)}, ends ${hourIn(job.seconds * (1 - done) / done)}`;
}

function showJobs(snapshot) {
  $('jobs-section').hidden = !snapshot.jobs.length;
  const create = () => {
    const row = rows('jobs', ['', '', 'wide', 'number', 'number', 'number'])();
    const target = make('span', { className: 'quiet small' });
    row.children[0].append(make('span'), target, make('span', { className: 'error' }));
    row.children[2].append(make('progress', { max: 1 }));
    return row;
  };
  keyed($('jobs'), snapshot.jobs.slice().reverse(), job => job.job, create, (row, job) => {
    const [name, state, progress, done, moved, time] = row.children;
    const title = `${job.job}: ${job.type} of ${job.export || '(default)'}`;
    set(name.firstChild, title);
    set(name.children[1], ` → ${job.target}`);
    set(name.lastChild, job.error || '');
    const status = job.exit_status ? ` (${job.exit_status})` : '';
    set(state, job.state + status);
    const bar = progress.firstChild;
    bar.value = job.state === 'completed' ? 1 : share(job.done, job.total);
    bar.className = JOB_FAILED.includes(job.state) ? 'failed' : '';
    bar.setAttribute('aria-label', `Progress of job ${title}`);
    set(done, job.total ? `${bytes(job.done)} of ${bytes(job.total)}` : bytes(job.done));
    set(moved, job.end_time ? '–' : rate(job.data_rate));
    set(time, jobTime(job));
  });
}

function showServe(snapshot) {
  $('progress-row').hidden = true;
  const exports = snapshot.exports_count;
  const served = exports === 1 ? `1 export: ${snapshot.exports[0].device}` : `${exports} exports`;
  set($('ends'), `${served}, ${snapshot.tls}`);
  document.title = `${snapshot.connections} connections – blockhaul serve`;
  showJobs(snapshot);
  showClients(snapshot);
  showExports(snapshot);
  announce(snapshot.finished ? endText(snapshot) : `serving, ${snapshot.connections} connections`);
  return snapshot.finished ? ['complete', 'ended'] : ['running', 'serving'];
}

// Both.

function announce(text) {
  if (page.announced !== text) set($('status'), text);
  page.announced = text;
}

function endText(snapshot) {
  if (snapshot.command === 'serve') return 'The server has ended. These are its last figures.';
  if (!snapshot.success) return `The program has ended with exit status ${snapshot.exit_status}: ${snapshot.error || 'it failed'}`;
  const verified = snapshot.phase === 'verify' ? ' and verified' : '';
  return `The program has ended: everything is copied${verified}. These are its last figures.`;
}

function notice(text, kind = '') {
  $('notice').hidden = !text;
  $('notice').className = `notice ${kind}`;
  set($('notice'), text);
}

function showTiles(tiles) {
  const create = () => make('div', {}, make('dt'), make('dd'));
  keyed($('tiles'), tiles, tile => tile[0], create, (tile, [name, value]) => {
    set(tile.firstChild, name);
    set(tile.lastChild, value);
  });
}

function showFigures(figures) {
  keyed($('figures-body'), figures, figure => figure[3], rows('figures-body', ['', 'number', 'number exact']), (row, [name, value, exact]) => {
    set(row.children[0], name);
    set(row.children[1], value);
    // Microseconds are as exact as the clocks.
    set(row.children[2], String(Number(exact.toFixed(6))));
  });
}

function show(snapshot) {
  keep(snapshot);
  const serve = snapshot.command === 'serve';
  $('summary').hidden = false;
  set($('title'), `blockhaul ${snapshot.command}`);
  set($('version'), `blockhaul ${snapshot.version}`);
  const [state, text] = serve ? showServe(snapshot) : showCopy(snapshot);
  $('state').className = `badge ${state}`;
  set($('state'), text);
  showTiles(serve ? serveTiles(snapshot) : copyTiles(snapshot));
  showFigures(serve ? serveFigures(snapshot) : copyFigures(snapshot));
  showCharts();
  if (snapshot.finished) notice(endText(snapshot), state);
}

// The connection.

function connect() {
  const events = new EventSource('/events');
  events.onmessage = event => {
    const snapshot = JSON.parse(event.data);
    if (!snapshot || snapshot.version === undefined) return;
    notice('');
    show(snapshot);
  };
  events.addEventListener('end', event => {
    page.ended = true;
    events.close();
    const snapshot = JSON.parse(event.data);
    if (snapshot && snapshot.version !== undefined) show(snapshot);
  });
  events.onerror = () => {
    if (page.ended) return;
    if (events.readyState === EventSource.CLOSED) {
      // Refused: too many viewers.
      events.close();
      setTimeout(connect, 5000);
    }
    const since = new Date().toTimeString().slice(0, 8);
    if ($('notice').hidden) {
      notice(`No answer from the program since ${since}. This page tries again, and shows the last figures until then.`, 'failed');
      announce('No answer from the program');
      $('state').className = 'badge waiting';
      set($('state'), 'no answer');
    }
  };
}

function listen() {
  document.querySelectorAll('[data-range]').forEach(button => button.addEventListener('click', () => {
    page.range = Number(button.dataset.range);
    document.querySelectorAll('[data-range]').forEach(other => other.setAttribute('aria-pressed', String(other === button)));
    if (page.charts.length) showCharts();
  }));
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -16, ArrowUp: 16, Home: -Infinity, End: Infinity };
  $('map').addEventListener('keydown', event => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    selectCell((page.cell === null ? -1 : page.cell) + steps[event.key]);
  });
  $('map').addEventListener('pointermove', event => {
    const map = page.last && page.last.map;
    if (map) selectCell(Math.floor((event.offsetX * map.data.length) / $('map').clientWidth));
  });
  for (const name of ['pointerleave', 'blur']) {
    $('map').addEventListener(name, () => {
      page.cell = null;
      if (page.last) showMap(page.last);
    });
  }
  new ResizeObserver(resize).observe(document.body);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    if (!page.last) return;
    if (page.charts.length) makeCharts();
    showMaps(page.last);
  });
}

listen();
connect();
