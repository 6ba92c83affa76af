// The state of the page is in its address: whoever opens the address sees the same picture, and Back goes back.
// In the page of a running job, some of it is about one version of the operations. It is used only while the page
// shows that version.

const defaults = {
  from: '', to: '',     // the time that the timeline shows, in microseconds
  rows: 'ranks',        // or tensor:N
  open: '',             // the rank whose tensors are shown
  align: '',            // or step:N or op:RANK.INDEX
  metric: 'caused',     // of the heat map
  table: 'ranks', sort: '', filter: '',
  rank: '',             // the rank that is marked
  op: '',               // the operation that is shown, RANK.INDEX
};

const ofVersion = ['from', 'to', 'rows', 'align', 'op'];

export const state = { ...defaults };
const listeners = [];
let version = null; // of the operations of a running job

function read() {
  const q = new URLSearchParams(location.hash.slice(1));
  for (const key in defaults) state[key] = q.get(key) ?? defaults[key];
  if (version !== history.state) for (const key of ofVersion) state[key] = defaults[key];
}

// setVersion says which version of the operations of a running job the page shows.
export function setVersion(id) {
  const first = version === null;
  version = id;
  if (first) read();
}

function write(push) {
  const q = new URLSearchParams();
  for (const key in defaults) if (state[key] !== defaults[key]) q.set(key, state[key]);
  const at = location.pathname + location.search + (q.size ? '#' + q : '');
  if (push) history.pushState(version, '', at);
  else history.replaceState(version, '', at);
}

let timer = 0;

// set changes the state and tells all listeners. A change is a step to which Back returns, unless it is small,
// such as one notch of the wheel. A change that sets the same values is ignored, except for the time: the same one
// may be shown instead of the end of a running job.
export function set(change, small = false) {
  change = Object.fromEntries(Object.entries(change).filter(([k, v]) => k === 'from' || k === 'to' || state[k] !== String(v)));
  if (!Object.keys(change).length) return;
  for (const key in change) state[key] = String(change[key]);
  if (small) {
    clearTimeout(timer);
    timer = setTimeout(write, 200);
  } else {
    clearTimeout(timer);
    write(true);
  }
  for (const f of listeners) f(change);
}

// onChange adds a listener.
export function onChange(f) { listeners.push(f); }

window.addEventListener('popstate', () => {
  read();
  for (const f of listeners) f(state);
});
read();
