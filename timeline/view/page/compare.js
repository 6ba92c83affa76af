// The comparison with another run.

import { $, el } from './dom.js';
import { count, duration, percent, plain, sentence } from './format.js';

const mostRows = 200;

const signed = us => (us > 0 ? '+' : '') + duration(us);
const head = ['what', 'A', 'B', 'difference', '', 'from', 'to', 'differs'];

// compare shows a comparison.
export function compare(c) {
  $('compare-section').hidden = false;
  $('compare-sentence').textContent = sentence(c.verdict);
  $('compare-runs').replaceChildren(...Object.entries({ A: c.a, B: c.b }).map(([name, r]) =>
    el('li', {}, `${name}: ${plain(r.title)}: ${count(r.ranks)} ranks, ${count(r.steps)} steps`)),
  ...c.problems.map(p => el('li', {}, sentence(p))));
  $('compare-scroll').hidden = !c.rows.length;
  const hidden = c.rows.length - mostRows;
  $('compare-table').replaceChildren(
    el('caption', {}, 'All intervals hold together with a confidence of 95 %' + (hidden > 0 ? `; ${count(hidden)} more tensors differ less clearly` : '')),
    el('thead', {}, el('tr', {}, ...head.map((h, i) => (h ? el('th', { scope: 'col', class: i ? 'number' : '' }, h) : el('td', {}))))),
    el('tbody', {}, ...c.rows.slice(0, mostRows).map(d => el('tr', { class: d.differs ? 'marked' : false },
      el('th', { scope: 'row', class: 'text' }, plain(d.tensor ?? d.what) || '(empty)'),
      ...[duration(d.a_us), duration(d.b_us), signed(d.difference_us),
        d.a_us > 0 ? (d.difference_us < 0 ? '-' : d.difference_us > 0 ? '+' : '') + percent(Math.abs(d.share)) : '-',
        signed(d.low_us), signed(d.high_us), d.differs ? 'yes' : 'no difference found'].map(text => el('td', { class: 'number' }, text))))));
}
