// The data of the page, and the tiles of the timeline. In a page that hvdrun view --export wrote, the data are in
// the page itself.

const exported = document.getElementById('exported');
const packed = exported ? JSON.parse(exported.textContent) : null;

// run is part of each address, so that the browser's cache never mixes two jobs.
let run = '';

// address returns the address of an answer. In the exported page it is only a key.
function address(name, query) {
  const q = new URLSearchParams(query);
  q.sort();
  const key = name + (q.size ? '?' + q : '');
  if (packed) return key;
  if (run) q.set('run', run);
  return 'data/' + name + '?' + q;
}

// Refused is the error of an answer that will be the same if it is asked for again.
class Refused extends Error {}

async function body(name, query) {
  const at = address(name, query);
  if (packed) {
    const text = packed[at];
    if (text === undefined) throw new Refused('This page was exported without this detail. Run hvdrun view to see it.');
    const stream = new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]).stream();
    return new Response(stream.pipeThrough(new DecompressionStream('gzip')));
  }
  const answer = await fetch(at).catch(() => {
    throw new Error('hvdrun view does not answer: it has ended, or the connection is broken.');
  });
  if (!answer.ok) throw new Refused((await answer.text()).trim());
  return answer;
}

// json returns data that is JSON.
export async function json(name, query = {}) { return (await body(name, query)).json(); }

// setRun sets the name of the run. The name of a running job changes with each of its states.
export function setRun(id) { run = id; }

// grid returns the rows of numbers of a picture of cells.
export async function grid(name) {
  const buffer = await (await body('grid', { name })).arrayBuffer();
  const [rows, columns] = new Uint32Array(buffer, 0, 2);
  return { rows, columns, cells: new Float32Array(buffer, 8) };
}

// decode decodes a tile; see Tile in tile.go.
function decode(buffer) {
  const [exact, rows, segments, periods] = new Uint32Array(buffer, 0, 4);
  let at = 16;
  const take = (type, n) => {
    const a = new type(buffer, at, n);
    at += a.byteLength;
    return a;
  };
  const t = { exact: exact === 1, rows, segments, periods };
  t.periodFrom = take(Float64Array, periods);
  t.periodTo = take(Float64Array, periods);
  t.from = take(Float64Array, segments);
  t.to = take(Float64Array, segments);
  t.periodRank = take(Uint32Array, periods);
  t.op = take(Uint32Array, segments);
  t.name = take(Int32Array, segments);
  t.row = take(Uint16Array, segments);
  t.phase = take(Uint8Array, segments);
  if (!t.exact) t.buckets = take(Uint8Array, buffer.byteLength - at);
  t.bytes = buffer.byteLength * (t.exact ? 1 : 5); // the bitmap takes four times as much
  return t;
}

const maxBytes = 48 << 20;
const tiles = new Map(); // the tiles by their key, in the order of their last use
let held = 0;

function keyOf(q) { return `${run}|${q.rows}|${q.align}|${q.level}|${q.index}|${q.group}`; }

// tile returns a tile, or undefined while it is fetched. It calls ready when the tile has come. If there is no such
// tile, its field failed is the error. An exported page lacks many tiles, so ready does not get this error there.
export function tile(query, ready) {
  const key = keyOf(query);
  const known = tiles.get(key);
  if (known) {
    tiles.delete(key);
    tiles.set(key, known);
    return known.tile;
  }
  const entry = {};
  tiles.set(key, entry);
  body('tile', query).then(a => a.arrayBuffer()).then(buffer => {
    entry.tile = decode(buffer);
    held += entry.tile.bytes;
    for (const [old, e] of tiles) {
      if (held <= maxBytes) break;
      if (e.tile && e !== entry) {
        held -= e.tile.bytes;
        tiles.delete(old);
      }
    }
    ready();
  }).catch(error => {
    if (error instanceof Refused) entry.tile = { failed: error, bytes: 0 };
    else if (tiles.get(key) === entry) tiles.delete(key); // it is asked for again
    ready(packed ? undefined : error);
  });
  return undefined;
}

// cached returns a tile only if it is there already.
export function cached(query) {
  const t = tiles.get(keyOf(query))?.tile;
  return t && !t.failed ? t : undefined;
}
