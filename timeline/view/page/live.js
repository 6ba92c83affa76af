// A running job: what it does now, and the stream of its states.

import { $, el } from './dom.js';
import { setRun } from './data.js';
import { plain } from './format.js';
import { set, setVersion } from './state.js';
import * as timeline from './timeline.js';

// now shows a state of the job.
function now(s) {
  const verdict = $('live-verdict');
  if (verdict.textContent !== plain(s.verdict)) verdict.textContent = plain(s.verdict);
  verdict.classList.toggle('alarm', s.alarm);
  const all = s.problems ?? [];
  const problems = all.map(p => plain(p.text)).join('\n');
  if ($('live-problems').dataset.text !== problems) {
    $('live-problems').dataset.text = problems;
    $('live-problems').replaceChildren(...all.map(p => el('li', { class: 'alarm' }, plain(p.text))));
  }
  $('live-report').textContent = (s.report ?? '').split('\n').map(plain).join('\n');
  $('live-timelines').textContent = plain(s.timelines);
  $('live-epochs').replaceChildren(...(s.epochs ?? []).map(text => el('li', {}, plain(text))));
  const missing = new Set(s.missing ?? []);
  $('live-table').replaceChildren(
    el('thead', {}, el('tr', {}, ...(s.columns ?? []).map(c => el('th', { scope: 'col' }, c)))),
    el('tbody', {}, ...(s.rows ?? []).map((row, i) => el('tr', { class: missing.has(i) ? 'alarm' : false },
      ...row.map((text, k) => (k ? el('td', {}, plain(text)) : el('th', { scope: 'row' }, plain(text))))))));
}

// follow shows each new state until the job ends or the page pauses. show fetches and shows the data of a state.
// The function that it returns pauses. While all pages of a job pause, nothing is recorded.
export function follow(show) {
  const button = $('follow');
  $('live').hidden = false;
  let stream, latest, silence, busy = false, ended = false;
  let shown; // the name of the data that are shown, since the page follows

  // next shows the latest state, and those that come meanwhile.
  async function next() {
    if (busy) return;
    busy = true;
    while (latest) {
      const s = latest;
      latest = undefined;
      now(s);
      ended = s.ended;
      try {
        if (s.run !== shown || ended) {
          timeline.freeze();
          setRun(s.run);
          setVersion(s.run);
          await show(!ended);
          shown = s.run;
        }
        if (!stream) timeline.stay(true); // the page has paused meanwhile
        else $('live-note').textContent = ended ? 'The numbers below are of the last minute before the end.'
          : 'The numbers below are of the last minute, as far as this page was open.';
      } catch (error) {
        if (!latest) $('live-note').textContent = plain(error.message); // else it was replaced meanwhile
      }
    }
    busy = false;
    if (ended) {
      stream?.close(); // hvdrun waits for this
      stream = undefined;
      button.hidden = true;
    }
  }

  // listen says so if hvdrun sends nothing. It sends a state every 0.5 s, or less often in a large job.
  function listen() {
    clearTimeout(silence);
    silence = setTimeout(() => {
      if (stream?.readyState === EventSource.OPEN) $('live-note').textContent = 'hvdrun has sent nothing for 10 s: it is stopped, or the connection is broken.';
    }, 10e3);
  }

  function begin() {
    listen();
    shown = undefined;
    stream = new EventSource('live');
    button.textContent = 'Pause';
    stream.addEventListener('message', e => {
      listen();
      latest = JSON.parse(e.data);
      next();
    });
    stream.addEventListener('error', () => {
      if (!stream) return;
      $('live-note').textContent = stream.readyState === EventSource.CLOSED
        ? 'hvdrun refuses to send the states of the job: it has ended, or too many pages follow it.'
        : 'The connection to hvdrun is broken. Trying again.';
    });
  }

  // stop pauses. If all is set, all is to be shown, else the picture stays.
  function stop(all = false) {
    if (!stream || ended) return;
    stream.close();
    stream = latest = undefined;
    timeline.stay(all);
    button.textContent = 'Follow';
    $('live-note').textContent = 'Paused. Nothing is recorded while all pages pause.';
  }

  button.addEventListener('click', () => {
    if (stream) {
      stop();
      return;
    }
    set({ from: '', to: '', op: '', align: '', rows: 'ranks' });
    begin();
  });
  begin();
  return stop;
}
