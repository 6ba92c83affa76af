// The timeline: a row for each rank, which can be unfolded to the rank's tensors, or one tensor on all ranks.
// Parts are drawn from bitmaps of tiles, or as rectangles where there are few.

import { $, channels, color, el, fit, hatch, say } from './dom.js';
import { cached, json, tile } from './data.js';
import { count, duration, plain } from './format.js';
import { set, state } from './state.js';

const axisHeight = 34;
const tensorHeight = 16;
const mostTensors = 40;
const mostRectangles = 5000;

let info, report;
let windowOf = { from_us: 0, to_us: 1, shift_us: [] };
let align;            // the alignment to which windowOf belongs
let labels = [];      // of the unfolded rank
let labelsOf = '';
let colors = [], patterns = {};
let scroll = 0;
let cursor = { row: 0, us: undefined }; // the row of the keyboard, and the time of the last click
let planned = false;
let following = false; // the end of a running job is shown
let frozen = false;    // the last frame stays until the tiles of a new state have come
let stale = false;     // labels and windowOf are of an earlier state
let choices = 0; // the number of calls of choose
const bitmaps = new WeakMap();

// drawn says what the last frame has drawn, and what was most in any frame. Tests read it.
export const drawn = { frames: 0, rectangles: 0, bitmaps: 0, mostRectangles: 0, mostBitmaps: 0 };
globalThis.drawn = drawn;

const canvas = () => $('timeline');

// gutter is the width of the labels.
function gutter() { return canvas().clientWidth < 700 ? 84 : 150; }

const recent = 10e6; // the time that is shown of a running job, in microseconds

// visible returns the time that is shown.
function visible() {
  if (following && state.from === '') return [Math.max(windowOf.from_us, windowOf.to_us - recent), windowOf.to_us];
  const from = state.from === '' ? windowOf.from_us : Number(state.from);
  const to = state.to === '' ? windowOf.to_us : Number(state.to);
  return to > from ? [from, to] : [windowOf.from_us, windowOf.to_us];
}

// rankHeight is the height of a rank's row. A low row has an even height, because it is two lines of a bitmap.
function rankHeight() {
  const n = Math.max(info.ranks.length, 1);
  const h = Math.min(32, Math.floor(560 / n));
  return h < 12 ? Math.max(2, h - h % 2) : h;
}

// layout returns the rows from top to bottom. The tensors of the unfolded rank follow its row.
function layout() {
  const h = rankHeight();
  const parts = [];
  let y = 0;
  info.ranks.forEach((r, i) => {
    parts.push({ rows: state.rows, row: i, y, height: h, rank: r.rank });
    y += h;
    if (state.rows === 'ranks' && state.open === String(r.rank)) {
      labels.slice(0, mostTensors).forEach((l, k) => {
        parts.push({ rows: 'rank:' + r.rank, row: k, y, height: tensorHeight, rank: r.rank, tensor: l.tensor, text: l.text });
        y += tensorHeight;
      });
    }
  });
  return { parts, height: y };
}

// refresh fetches what a change of the state needs, and draws. If the state changes meanwhile, the later call
// draws.
export async function refresh() {
  let failed;
  const fail = error => { failed = error; };
  const anew = stale;
  stale = false;
  if (align !== state.align || anew) {
    const wanted = align = state.align;
    const fetched = await json('window', wanted ? { align: wanted } : {}).catch(fail) ??
      await json('window').catch(fail);
    if (align !== wanted) return;
    windowOf = fetched ?? windowOf;
    if (failed) align = undefined; // so that it is asked for again
  }
  const rows = state.open === '' ? '' : 'rank:' + state.open;
  if (labelsOf !== rows || anew) {
    if (labelsOf !== rows) labels = [];
    labelsOf = rows;
    const fetched = rows ? await json('labels', { rows }).catch(fail) : [];
    if (labelsOf !== rows) return;
    labels = fetched ?? [];
    if (!fetched) labelsOf = undefined;
  }
  tools();
  if (failed) complain(failed);
  draw();
}

function complain(error) { $('timeline-note').textContent = error.message; }

// draw plans a frame.
export function draw() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    paint();
  });
}

// theme makes the colours anew.
export function theme() {
  colors = info.phases.map(p => (p ? channels(color(p)) : null));
  const c = canvas().getContext('2d');
  patterns = {
    waiting: hatch(c, color('waiting'), color('waiting-ground')),
    result: hatch(c, color('result'), color('inset')),
    held: hatch(c, color('late')),
  };
  draw();
}

function css(phase) { return `rgb(${colors[phase].join(' ')})`; }

// bitmap returns the picture of a tile: for each row a line for the phases of execution, and below it one for
// those before.
function bitmap(t) {
  const known = bitmaps.get(t);
  if (known?.colors === colors) return known.picture;
  const width = info.tile_buckets;
  const picture = document.createElement('canvas');
  picture.width = width;
  picture.height = t.rows * 2;
  const c = picture.getContext('2d');
  const image = c.createImageData(width, t.rows * 2);
  const out = image.data;
  for (let row = 0; row < t.rows; row++) {
    for (let half = 0; half < 2; half++) {
      let at = ((row * 2 + 1 - half) * width) * 4;
      const from = (row * 2 + half) * width;
      for (let x = 0; x < width; x++, at += 4) {
        const b = t.buckets[from + x];
        const rgb = colors[b & 15];
        if (!rgb) continue;
        out[at] = rgb[0];
        out[at + 1] = rgb[1];
        out[at + 2] = rgb[2];
        out[at + 3] = 55 + (b >> 4) * 13.3;
      }
    }
  }
  c.putImageData(image, 0, 0);
  bitmaps.set(t, { colors, picture });
  return picture;
}

// slots returns the tiles that cover the visible time. There are at most three.
function slots(from, to) {
  const all = windowOf.to_us - windowOf.from_us;
  const level = Math.max(0, Math.min(info.max_level, Math.floor(Math.log2(all / (to - from))) + 1));
  const width = all / 2 ** level;
  const first = Math.max(0, Math.floor((from - windowOf.from_us) / width));
  const last = Math.min(2 ** level - 1, Math.floor((to - windowOf.from_us) / width - 1e-9));
  const found = [];
  for (let index = first; index <= last; index++) {
    found.push({ level, index, from: windowOf.from_us + index * width, width });
  }
  return found;
}

function paint() {
  const c0 = canvas();
  const width = c0.clientWidth;
  if (!width || !info) return;
  const { parts, height: all } = layout();
  const most = Math.max(240, Math.round(window.innerHeight * 0.7));
  const height = Math.min(all + axisHeight + 8, most);
  scroll = Math.max(0, Math.min(scroll, all + axisHeight + 8 - height));
  const left = gutter();
  const [from, to] = visible();
  if (frozen && !complete(parts, from, to)) return;
  frozen = false;
  const c = fit(c0, width, height);
  const x = us => left + (us - from) / (to - from) * (width - left);
  drawn.rectangles = drawn.bitmaps = 0;
  c.fillStyle = color('surface');
  c.fillRect(0, 0, width, height);

  const top = axisHeight - scroll;
  const shown = parts.filter(p => p.y + p.height + top > axisHeight && p.y + top < height);
  c.save();
  c.beginPath();
  c.rect(0, axisHeight, width, height - axisHeight);
  c.clip();
  rowsBehind(c, shown, top, width, left);
  c.save();
  c.beginPath();
  c.rect(left, axisHeight, width - left, height - axisHeight);
  c.clip();
  c.imageSmoothingEnabled = false;
  const bands = new Map(); // by rank and begin, because a period may be in several tiles
  for (const group of groups(shown)) for (const slot of slots(from, to)) piece(c, group, slot, x, top, bands);
  hold(c, bands.values(), shown, parts, x, top, height);
  const chosen = chosenTime();
  if (chosen !== undefined) {
    c.fillStyle = color('text');
    rectangle(c, x(chosen), axisHeight, 1, height);
  }
  c.restore();
  names(c, shown, top, left, parts[Math.min(cursor.row, parts.length - 1)]);
  c.restore();
  axis(c, from, to, left, width);
  drawn.frames++;
  drawn.mostRectangles = Math.max(drawn.mostRectangles, drawn.rectangles);
  drawn.mostBitmaps = Math.max(drawn.mostBitmaps, drawn.bitmaps);
}

// complete reports whether all tiles of a picture are there. Those that are not are fetched.
function complete(parts, from, to) {
  let all = true;
  for (const g of groups(parts)) {
    for (const slot of slots(from, to)) {
      const query = { rows: g.rows, level: slot.level, index: slot.index, group: g.group, align: state.align };
      all = !!tile(query, tileCame) && all;
    }
  }
  return all;
}

function tileCame(error) {
  if (error) complain(error);
  else draw();
}

function rectangle(c, x, y, w, h) {
  if (++drawn.rectangles > mostRectangles) return; // a test checks that no frame needs more
  c.fillRect(x, y, w, h);
}

// rowsBehind draws the grounds of the rows: of the marked rank, and a line where another host begins.
function rowsBehind(c, shown, top, width) {
  for (const p of shown) {
    const y = p.y + top;
    if (state.rank === String(p.rank) && p.tensor === undefined) {
      c.fillStyle = color('marked');
      rectangle(c, 0, y, width, p.height);
    } else if (p.tensor !== undefined) {
      c.fillStyle = color('inset');
      rectangle(c, 0, y, width, p.height);
    }
    const before = info.ranks[p.row - 1];
    if (p.tensor === undefined && before && before.host !== info.ranks[p.row].host) {
      c.fillStyle = color('line');
      rectangle(c, 0, y, width, 1);
    }
  }
}

// groups joins the shown rows that belong to one tile.
function groups(shown) {
  const found = [];
  for (const p of shown) {
    const group = Math.floor(p.row / info.tile_rows);
    const last = found.at(-1);
    if (last && last.rows === p.rows && last.group === group && last.parts.at(-1).row === p.row - 1) last.parts.push(p);
    else found.push({ rows: p.rows, group, parts: [p] });
  }
  return found;
}

// piece draws a tile of a group, or what is known of it while it is fetched, or if there is no such tile.
function piece(c, g, slot, x, top, bands) {
  const query = { rows: g.rows, level: slot.level, index: slot.index, group: g.group, align: state.align };
  let t = tile(query, tileCame);
  let at = slot;
  let part = 1;
  while ((!t || t.failed) && at.level > 0) {
    at = { level: at.level - 1, index: at.index >> 1 };
    part /= 2;
    const above = { ...query, level: at.level, index: at.index };
    t = t?.failed ? tile(above, tileCame) : cached(above);
  }
  if (t?.failed) complain(t.failed);
  if (!t || t.failed) return;
  const [first, last] = [g.parts[0], g.parts.at(-1)];
  if (t.exact) {
    exact(c, g, t, slot, x, top);
  } else {
    const picture = bitmap(t);
    const offset = (slot.index - at.index * 2 ** (slot.level - at.level)) * part * picture.width;
    const row = first.row - g.group * info.tile_rows;
    const end = last.row - g.group * info.tile_rows + 1;
    const a = x(slot.from);
    const b = x(slot.from + slot.width);
    const pad = first.height > 6 ? 1 : 0;
    c.drawImage(picture, offset, row * 2, part * picture.width, (end - row) * 2, a, first.y + top,
      b - a, last.y + last.height - first.y);
    drawn.bitmaps++;
    if (pad) {
      c.fillStyle = color('surface');
      for (const p of g.parts) rectangle(c, a, p.y + top + p.height - 1, b - a, 1);
    }
  }
  for (let i = 0; i < t.periods; i++) {
    bands.set(t.periodRank[i] + ' ' + t.periodFrom[i], { from: t.periodFrom[i], to: t.periodTo[i], rank: t.periodRank[i] });
  }
}

// exact draws the segments of a tile: those of the execution in the upper half of the row.
function exact(c, g, t, slot, x, top) {
  const first = g.group * info.tile_rows;
  const byRow = new Map(g.parts.map(p => [p.row - first, p]));
  const fills = info.phases.map((p, i) => (p in patterns ? patterns[p] : p && css(i)));
  for (let i = 0; i < t.segments; i++) {
    const p = byRow.get(t.row[i]);
    if (!p) continue;
    const a = x(Math.max(t.from[i], slot.from));
    const b = x(Math.min(t.to[i], slot.from + slot.width));
    if (b < 0 || b < a) continue;
    const phase = t.phase[i];
    const name = info.phases[phase];
    const waits = phase < 4 || name === 'result';
    const h = p.height / 2;
    const y = p.y + top + (waits ? h : 1);
    c.fillStyle = fills[phase];
    rectangle(c, a, y, Math.max(b - a, 0.6), h - 1);
    if (b - a > 60 && (p.height >= 20 || name === 'range') && !waits) {
      c.fillStyle = color('on-' + name) || color('text');
      c.font = '10px ' + font;
      c.textBaseline = 'middle';
      text(c, name === 'range' || (state.rows === 'ranks' && p.tensor === undefined) ? plain(info.names[t.name[i]] ?? '') : name, a + 4,
        y + h / 2, b - a - 8);
    }
  }
}

// hold draws the periods in which a rank held up all others: solid in its row, hatched across the others.
function hold(c, bands, shown, parts, x, top, height) {
  const rowOf = new Map(parts.filter(p => p.tensor === undefined).map(p => [p.rank, p]));
  const tensors = parts.filter(p => p.tensor !== undefined);
  const bottom = Math.min(height, (parts.at(-1)?.y ?? 0) + (parts.at(-1)?.height ?? 0) + top);
  for (const b of bands) {
    const [left, right] = [x(b.from), x(b.to)];
    if (right - left < 1.5) continue;
    const p = rowOf.get(b.rank);
    if (!p) continue;
    const y = p.y + top;
    c.fillStyle = patterns.held;
    c.globalAlpha = 0.45;
    rectangle(c, left, axisHeight, right - left, Math.max(y - axisHeight, 0));
    const below = y + p.height + tensors.filter(t => t.rank === b.rank).length * tensorHeight;
    rectangle(c, left, below, right - left, Math.max(bottom - below, 0));
    c.globalAlpha = 1;
    c.fillStyle = color('late');
    rectangle(c, left, y, right - left, p.height);
    if (p.height >= 12) {
      c.fillStyle = color('on-late');
      c.font = '600 11px ' + font;
      c.textBaseline = 'middle';
      const from = Math.max(left, gutter());
      const room = Math.min(right, canvas().clientWidth) - from - 8;
      const time = duration(b.to - b.from);
      const label = ['late ' + time, time].find(t => c.measureText(t).width <= room);
      if (label) c.fillText(label, from + 4, y + p.height / 2 + 1);
    }
  }
}

const font = 'system-ui, "DejaVu Sans", sans-serif';

// text draws a text if it fits, otherwise as much of it as fits.
function text(c, whole, x, y, width) {
  if (c.measureText(whole).width <= width) {
    c.fillText(whole, x, y);
    return;
  }
  let n = Math.floor(whole.length * width / Math.max(c.measureText(whole).width, 1)) - 1;
  while (n > 2 && c.measureText(whole.slice(0, n) + '…').width > width) n--;
  if (n > 2) c.fillText(whole.slice(0, n) + '…', x, y);
}

// names draws the labels of the rows, and a frame around the one that the keyboard has chosen.
function names(c, shown, top, left, chosen) {
  c.textBaseline = 'middle';
  let free = -Infinity;
  const middle = p => p.y + top + Math.max(p.height / 2, 7);
  const marked = shown.find(p => p.tensor === undefined && String(p.rank) === state.rank);
  for (const p of shown) {
    const y = middle(p);
    const r = info.ranks[p.row];
    // Low rows have the names of hosts, and only the marked rank has its own.
    const low = p.tensor === undefined && p.height < 11 && p !== marked;
    if (low && info.ranks[p.row - 1]?.host === r.host && p.row % 32) continue;
    if (y - free < 13 || (low && marked && Math.abs(y - middle(marked)) < 13)) continue;
    free = y;
    c.font = (p.tensor === undefined ? '12px ' : '11px ') + font;
    c.fillStyle = color(p.tensor === undefined ? 'text' : 'quiet');
    let label = 'rank ' + p.rank;
    if (low && left > 100 && r.host) label = plain(r.host) + ': ' + p.rank + ' …';
    else if (p.tensor !== undefined) label = plain(p.text);
    else if (!r.has_file) label += left > 100 ? (info.live ? ' · not recorded' : ' · no file') : '';
    else if (left > 100 && r.host) label += ' · ' + plain(r.host);
    if (p.tensor === undefined && state.rows === 'ranks' && !low) label = (state.open === String(p.rank) ? '▾ ' : '▸ ') + label;
    text(c, label, p.tensor === undefined ? 6 : 18, y, left - (p.tensor === undefined ? 12 : 24));
  }
  if (shown.includes(chosen) && document.activeElement === canvas()) {
    c.strokeStyle = color('focus');
    c.lineWidth = 2;
    c.strokeRect(1, chosen.y + top + 1, left - 3, Math.max(chosen.height - 2, 2));
  }
}

// axis draws the time above the rows.
function axis(c, from, to, left, width) {
  c.fillStyle = color('surface');
  c.fillRect(0, 0, width, axisHeight);
  c.fillStyle = color('quiet');
  c.strokeStyle = color('line');
  c.lineWidth = 1;
  c.font = '11px ' + font;
  c.textBaseline = 'middle';
  const span = to - from;
  const rough = span / Math.max(2, Math.floor((width - left) / 110));
  const power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map(m => m * power).find(g => g >= rough);
  const unit = gap >= 1e6 ? [1e6, 's'] : gap >= 1e3 ? [1e3, 'ms'] : [1, 'us'];
  const digits = Math.max(0, Math.ceil(-Math.log10(gap / unit[0]) - 1e-9));
  for (let us = Math.ceil(from / gap) * gap; us <= to; us += gap) {
    const x = left + (us - from) / span * (width - left);
    c.beginPath();
    c.moveTo(x, 2);
    c.lineTo(x, 18);
    c.stroke();
    const label = (us / unit[0] + 0).toFixed(digits).replace(/^-(0\.?0*)$/, '$1') + ' ' + unit[1];
    if (x + c.measureText(label).width + 4 < width) c.fillText(label, x + 3, 10);
  }
  c.fillText(state.align ? 'aligned' : 'time', 6, 10);
  // A mark for each step, if there are few. Steps are those of the first rank, so they fit only unshifted times.
  const marks = state.align ? [] : report.steps_shown.filter(s => s.begin_us >= from && s.begin_us <= to);
  if (marks.length * 70 < width) {
    for (const s of marks) {
      const x = left + (s.begin_us - from) / span * (width - left);
      c.fillStyle = color('accent');
      rectangle(c, x, axisHeight - 13, 1, 13);
      c.fillRect(x, axisHeight - 13, 44, 1);
      if (x + 50 < width) c.fillText(s.name, x + 3, axisHeight - 6);
    }
  }
  c.beginPath();
  c.moveTo(0, axisHeight - 0.5);
  c.lineTo(width, axisHeight - 0.5);
  c.stroke();
}

// current returns the row that the keyboard has chosen.
function current() {
  const { parts } = layout();
  return parts[Math.min(cursor.row, parts.length - 1)];
}

// chosenTime returns the time of the last click if it is shown.
function chosenTime() {
  const [from, to] = visible();
  return cursor.us >= from && cursor.us <= to ? cursor.us : undefined;
}

// zoom changes the shown time by a factor. The time at stays where it is.
function zoom(factor, at) {
  const [from, to] = visible();
  at ??= (from + to) / 2;
  const all = windowOf.to_us - windowOf.from_us;
  const span = Math.max(1, Math.min(all, (to - from) * factor));
  move(at - (at - from) * span / (to - from), span);
}

// move shows the time from a begin, within the bounds.
function move(from, span) {
  from = Math.max(windowOf.from_us, Math.min(from, windowOf.to_us - span));
  const all = windowOf.to_us - windowOf.from_us;
  if (span >= all * 0.9999) set({ from: '', to: '' }, true);
  else set({ from, to: from + span }, true);
}

// show shows a time in the middle, with some room around it.
export function show(from, to, change = {}) {
  const room = (to - from) * 0.1;
  set({ from: Math.max(from - room, windowOf.from_us), to: Math.min(to + room, windowOf.to_us), ...change });
}

// toLate shows the next time, or the previous one, at which a step was held up.
function toLate(direction) {
  const [from, to] = visible();
  const middle = (from + to) / 2;
  const late = report.steps_shown.filter(s => s.held_us > 0);
  const next = direction > 0 ? late.find(s => s.begin_us + s.us / 2 > middle * 1.000001 + 1)
    : late.findLast(s => s.begin_us + s.us / 2 < middle * 0.999999 - 1);
  if (!next) {
    say('There is no further step in which a rank held up all others.');
    return;
  }
  show(next.begin_us, next.begin_us + next.us);
  say(`${next.name}: ` + next.held.map(h => `rank ${h.rank} held up all others for ${duration(h.us)}`).join(', '));
}

function toggle(p) {
  if (state.rows !== 'ranks' || !p || p.tensor !== undefined) return;
  set({ open: state.open === String(p.rank) ? '' : p.rank, rank: p.rank });
}

// choose shows the operation at a time in a row.
async function choose(p, us) {
  const mine = ++choices;
  try {
    const o = await json('find', { rows: p.rows, row: p.row, us, align: state.align });
    if (mine === choices) set({ op: `${o.rank}.${o.index}`, rank: p.rank });
  } catch (error) {
    if (mine !== choices) return;
    set({ rank: p.rank, op: '' });
    complain(error);
    say(error.message);
  }
}

function rowAt(y) {
  const at = y - axisHeight + scroll;
  return y < axisHeight ? undefined : layout().parts.find(p => at >= p.y && at < p.y + p.height);
}

function timeAt(x) {
  const [from, to] = visible();
  return from + (x - gutter()) / (canvas().clientWidth - gutter()) * (to - from);
}

// keys does what a key means, and reports whether it means anything.
function key(e) {
  if (e.ctrlKey || e.metaKey || e.altKey) return false;
  const [from, to] = visible();
  const span = to - from;
  const { parts } = layout();
  const row = d => {
    cursor.row = Math.max(0, Math.min(parts.length - 1, cursor.row + d));
    const p = parts[cursor.row];
    const h = canvas().clientHeight - axisHeight;
    scroll = Math.max(p.y + p.height - h + 8, Math.min(scroll, p.y));
    say(p.tensor === undefined ? `rank ${p.rank}` : plain(p.text));
    draw();
  };
  switch (e.key) {
    case 'w': case '+': case '=': zoom(1 / 1.5, chosenTime()); break;
    case 's': case '-': zoom(1.5, chosenTime()); break;
    case 'a': case 'ArrowLeft': move(from - span / 5, span); break;
    case 'd': case 'ArrowRight': move(from + span / 5, span); break;
    case '0': case 'f': set({ from: '', to: '' }); break;
    case '.': toLate(1); break;
    case ',': toLate(-1); break;
    case 'ArrowUp': row(-1); break;
    case 'ArrowDown': row(1); break;
    case 'PageUp': row(-20); break;
    case 'PageDown': row(20); break;
    case 'u': case ' ': toggle(current()); break;
    case 'Enter': if (current()) choose(current(), chosenTime() ?? (from + to) / 2); break;
    case 'Escape': cursor.us = undefined; set({ op: '', rank: '' }); draw(); break;
    default: return false;
  }
  return true;
}

// freeze keeps the picture until renew was called and the data of the new state are there.
export function freeze() { frozen = stale = true; }

// renew shows another state of a job. If follow is set, its end is shown.
export function renew(theInfo, theReport, follow) {
  info = theInfo;
  report = theReport;
  following = follow;
  cursor.us = undefined; // the new times may begin elsewhere
}

// stay ends the following of a running job. The picture stays the same, unless all is to be shown.
export function stay(all) {
  const [from, to] = visible();
  const keeps = following && state.from === '' && !all;
  following = false;
  if (keeps) set({ from, to }, true);
}

// start connects the timeline with the page.
export function start(theInfo, theReport) {
  renew(theInfo, theReport, false);
  const c = canvas();
  c.addEventListener('keydown', e => { if (key(e)) e.preventDefault(); });
  c.addEventListener('focus', draw);
  c.addEventListener('blur', draw);
  c.addEventListener('wheel', e => {
    const x = e.offsetX;
    if (e.ctrlKey || e.metaKey) zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaY)) / 150), timeAt(x));
    else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      const [from, to] = visible();
      move(from + (e.deltaX || e.deltaY) / c.clientWidth * (to - from), to - from);
    } else {
      const before = scroll;
      scroll += e.deltaY;
      paint();
      if (scroll === before) return; // the page scrolls
    }
    e.preventDefault();
  }, { passive: false });
  let drag = null;
  c.addEventListener('pointerdown', e => {
    if (e.button) return; // another button than the first
    drag = { x: e.offsetX, y: e.offsetY, view: visible(), moved: false };
    c.setPointerCapture(e.pointerId);
  });
  c.addEventListener('pointermove', e => {
    if (!drag) return;
    if (Math.abs(e.offsetX - drag.x) > 3) drag.moved = true;
    if (!drag.moved) return;
    const [from, to] = drag.view;
    move(from - (e.offsetX - drag.x) / (c.clientWidth - gutter()) * (to - from), to - from);
  });
  c.addEventListener('pointerup', e => {
    const was = drag;
    drag = null;
    if (!was || was.moved) return;
    const p = rowAt(e.offsetY);
    if (!p) return;
    cursor.row = layout().parts.findIndex(q => q.y === p.y);
    if (e.offsetX < gutter()) {
      toggle(p);
      return;
    }
    cursor.us = timeAt(e.offsetX);
    choose(p, cursor.us);
    draw();
  });
  c.addEventListener('pointercancel', () => { drag = null; });
  new ResizeObserver(draw).observe(c);
  $('align-clock').addEventListener('click', () => set({ align: '', from: '', to: '' }));
  $('align-step').addEventListener('click', () => alignStep());
  $('zoom-in').addEventListener('click', () => zoom(1 / 1.5));
  $('zoom-out').addEventListener('click', () => zoom(1.5));
  $('zoom-all').addEventListener('click', () => set({ from: '', to: '' }));
  $('late-next').addEventListener('click', () => toLate(1));
  $('late-previous').addEventListener('click', () => toLate(-1));
  $('all-tensors').addEventListener('click', () => set({ rows: 'ranks' }));
  const legend = $('phases');
  for (const [i, p] of info.phases.entries()) {
    if (!p) continue;
    const texts = { late: 'late: all others wait', waiting: 'waiting for other ranks', result: 'program: waits for a result', range: 'program: in a range' };
    legend.append(el('li', {}, el('span', { class: 'swatch phase-' + p, 'aria-hidden': 'true' }), texts[p] ?? p));
  }
}

// alignStep aligns the ranks at the step in the middle of the picture.
function alignStep() {
  const [from, to] = visible();
  const steps = report.steps_shown;
  if (!steps.length) {
    complain(new Error('The timelines have no steps.'));
    return;
  }
  const s = steps.findLast(s => s.begin_us <= (from + to) / 2) ?? steps[0];
  set({ align: 'step:' + s.index, from: s.begin_us - s.us * 0.2, to: s.begin_us + s.us * 1.1 });
}

// tools shows what is chosen above the timeline.
function tools() {
  const tensor = state.rows.startsWith('tensor:') ? Number(state.rows.slice(7)) : -1;
  $('all-tensors').hidden = tensor < 0;
  $('rows-shown').textContent = tensor < 0 ? 'All operations. A row shows the execution above, and waiting below.'
    : 'Only ' + plain(info.names[tensor] ?? '') + ', on all ranks.';
  $('align-clock').setAttribute('aria-pressed', state.align === '');
  $('align-step').setAttribute('aria-pressed', state.align.startsWith('step:'));
  const [kind, at] = state.align.split(':');
  let note = '';
  if (kind === 'step') {
    note = `Aligned by ${report.steps_shown[at - 1]?.name ?? 'a step'}: the time of each rank is counted from the end of the operation before the step.`;
  } else if (kind === 'op') {
    note = 'Aligned by one operation: all ranks are moved so that its grant is at the same time.';
  } else if (state.open !== '' && labels.length > mostTensors) {
    note = `Rank ${state.open} has ${count(labels.length)} tensors; the first ${mostTensors} are shown. The table of tensors shows any of them on all ranks.`;
  }
  $('timeline-note').textContent = note;
}
