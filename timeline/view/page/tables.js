// The tables of ranks, hosts, tensors and steps. They have every number of the page as text.

import { $, el, say } from './dom.js';
import { count, duration, percent, plain, size } from './format.js';
import { set, state } from './state.js';

const mostRows = 200;

// column makes a column: its name, its value by which it is sorted, and its format. title explains it.
const column = (name, value, format, title) => ({ name, value, format, title });
const dash = format => v => (v === undefined ? '-' : format(v));

// kindsOf returns the tables of a report. actions has what a click on a name does.
function kindsOf(info, report, actions) {
  const numbers = new Map(info.names.map((name, i) => [name, i]));
  const late = new Map(report.lateness.ranks.map(r => [r.rank, r]));
  const of = key => r => late.get(r.rank)?.[key];
  const phases = new Map(report.phases.map(p => [p.rank, p]));
  const inPhase = name => r => phases.get(r.rank)?.us[name];
  return {
    ranks: {
      rows: info.ranks, first: 'held up all',
      columns: [
        column('rank', r => r.rank, String),
        column('host', r => r.host, plain),
        column('held up all', of('held_us'), dash(duration), 'the time for which all others waited for this rank'),
        column('per step', of('held_per_step_us'), dash(duration), 'the same, per step'),
        column('last', of('last'), dash(count), 'the number of operations that this rank submitted last'),
        column('caused', of('caused_us'), dash(duration), 'the waiting of all ranks that this rank caused'),
        column('share', of('share'), dash(percent), 'its share of all waiting'),
        column('late p50', of('lateness_p50_us'), dash(duration), 'how much later than the first rank it submitted: median'),
        column('p90', of('lateness_p90_us'), dash(duration), 'the 90th percentile'),
        column('p99', of('lateness_p99_us'), dash(duration), 'the 99th percentile'),
        column('max', of('lateness_max_us'), dash(duration), 'the maximum'),
        ...(report.lateness.ranks.some(r => r.doing.length) ? [column('while in', r => of('doing')(r)?.[0]?.range, dash(v => plain(v) || 'no range'), 'the range of the program in which it was for most of the time held up')] : []),
        column('waiting', inPhase('waiting'), dash(duration), 'the time in which an operation of this rank waited for other ranks'),
        column('outside', inPhase('outside'), dash(duration), 'the time without an operation in flight: the program computes'),
      ],
      act: r => actions.rank(r.rank),
    },
    hosts: {
      rows: report.hosts, first: 'caused',
      columns: [
        column('host', h => h.host, v => plain(v) || '(unknown)'),
        column('ranks', h => h.ranks.length, (v, h) => plain(h.ranks.slice(0, 16).join(' ') + (v > 16 ? ' …' : ''))),
        column('held up all', h => h.held_us, duration, 'the time for which all others waited for one of these ranks'),
        column('caused', h => h.caused_us, duration, 'the waiting of all ranks that these ranks caused'),
        column('share', h => h.share, percent, 'their share of all waiting'),
      ],
      act: h => actions.rank(h.ranks[0]),
    },
    tensors: {
      rows: report.tensor_table, first: 'waited',
      columns: [
        column('tensor', t => t.name, plain),
        column('operation', t => t.kind, plain),
        column('waited', t => t.waited_us, duration, 'for how long ranks waited for others in this tensor, added up'),
        column('total', t => t.total_us, duration, 'from the submission to the end, over all ranks'),
        column('mean', t => t.mean_us, duration),
        column('p99', t => t.p99_us, duration),
        column('max', t => t.max_us, duration),
        column('times', t => t.count, count),
        column('bytes', t => t.bytes, size),
        column('type', t => t.dtype + t.shape, plain),
        column('errors', t => t.errors, count),
      ],
      act: t => actions.tensor(numbers.get(t.name)),
    },
    steps: {
      rows: report.steps_shown, first: 'held up all',
      columns: [
        column('step', s => s.number, (v, s) => s.name.replace(/^steps? /, '')),
        column('begin', s => s.begin_us, duration, 'since the first submission of the job'),
        column('length', s => s.us, duration),
        column('held up all', s => s.held_us, duration, 'the time for which one rank held up all others'),
        column('by', s => s.held.map(h => h.rank).join(' '), (v, s) => s.held.map(h => `rank ${h.rank} ${duration(h.us)}`).join(', ') || '-'),
        column('waited', s => s.waited_us, duration, 'the waiting of all ranks, added up'),
      ],
      act: s => actions.step(s),
    },
  };
}

// start connects the tables with the page.
export function start(info, report, actions) {
  let kinds = kindsOf(info, report, actions);

  function rowsOf(kind) {
    const k = kinds[kind];
    const [name, direction] = state.sort ? state.sort.split('/') : [k.first, 'down'];
    const by = k.columns.find(c => c.name === name) ?? k.columns[0];
    const want = state.filter.toLowerCase();
    const rows = k.rows.filter(r => !want || k.columns.some(c => String(c.format(c.value(r), r)).toLowerCase().includes(want)));
    const order = direction === 'up' ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [by.value(a), by.value(b)];
      if (x === y) return 0;
      if (x === undefined) return 1;
      if (y === undefined) return -1;
      return (x < y ? -1 : 1) * order;
    });
    return { rows, by, direction };
  }

  function refresh() {
    const kind = kinds[state.table] ? state.table : 'ranks';
    for (const b of $('tabs').children) {
      b.setAttribute('aria-selected', b.dataset.table === kind);
      b.tabIndex = b.dataset.table === kind ? 0 : -1;
    }
    const k = kinds[kind];
    const { rows, by, direction } = rowsOf(kind);
    if ($('filter').value !== state.filter) $('filter').value = state.filter;
    const isText = c => ['host', 'ranks', 'tensor', 'while in', 'operation', 'type', 'by'].includes(c.name);
    const head = el('tr', {}, ...k.columns.map(c => el('th', {
      scope: 'col', class: isText(c) ? '' : 'number', title: c.title,
      'aria-sort': c === by ? (direction === 'up' ? 'ascending' : 'descending') : false,
    }, el('button', {
      type: 'button',
      click: () => set({ sort: c.name + '/' + (c === by && direction === 'down' ? 'up' : 'down') }),
    }, c.name + (c === by ? (direction === 'up' ? ' ▲' : ' ▼') : '')))));
    const body = rows.slice(0, mostRows).map(r => el('tr', {
      class: kind === 'ranks' && String(r.rank) === state.rank ? 'marked' : false,
    }, ...k.columns.map((c, i) => {
      const text = c.format(c.value(r), r);
      if (i) return el('td', { class: isText(c) ? 'text' : 'number' }, text);
      return el('th', { scope: 'row', class: isText(c) ? 'text' : 'number' },
        el('button', { type: 'button', class: 'link', click: () => k.act(r) }, text || '(empty)'));
    })));
    const focus = document.activeElement?.closest('#table') ? document.activeElement.textContent.replace(/ [▲▼]$/, '') : '';
    $('table').replaceChildren(
      el('caption', {}, caption(kind, rows.length, k.rows.length)), el('thead', {}, head), el('tbody', {}, ...body));
    if (focus) [...$('table').querySelectorAll('button')].find(b => b.textContent.replace(/ [▲▼]$/, '') === focus)?.focus();
    $('panel').setAttribute('aria-labelledby', 'tab-' + kind);
  }

  function caption(kind, found, all) {
    let text = state.filter ? `${count(found)} of ${count(all)} ${kind}` : `${count(all)} ${kind}`;
    if (found > mostRows) text += `; the first ${mostRows} are shown, the filter and the order reach the others`;
    return text + (kind === 'tensors' ? '. Choose a tensor to see it on all ranks.' : kind === 'steps' ? '. Choose a step to see it in the timeline.' : '');
  }

  $('filter').addEventListener('input', () => set({ filter: $('filter').value }, true));
  $('copy').addEventListener('click', async () => {
    const kind = kinds[state.table] ? state.table : 'ranks';
    const { rows } = rowsOf(kind);
    const lines = [kinds[kind].columns.map(c => c.name), ...rows.map(r => kinds[kind].columns.map(c => c.format(c.value(r), r)))];
    try {
      await navigator.clipboard.writeText(lines.map(l => l.join('\t')).join('\n') + '\n');
      say(`${rows.length} rows copied`);
      $('copy').textContent = 'Copied';
    } catch {
      $('copy').textContent = 'The browser does not allow it';
    }
    setTimeout(() => { $('copy').textContent = 'Copy'; }, 2000);
  });
  for (const kind of Object.keys(kinds)) {
    $('tabs').append(el('button', { type: 'button', role: 'tab', id: 'tab-' + kind, 'data-table': kind, 'aria-controls': 'panel',
      click: () => set({ table: kind, sort: '', filter: '' }) }, kind[0].toUpperCase() + kind.slice(1)));
  }
  $('tabs').addEventListener('keydown', e => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!step) return;
    const all = Object.keys(kinds);
    const next = all[(all.indexOf(state.table) + step + all.length) % all.length];
    set({ table: next, sort: '', filter: '' });
    $('tab-' + next).focus();
  });
  return {
    refresh,
    // update shows another report.
    update(info, report) {
      kinds = kindsOf(info, report, actions);
      refresh();
    },
  };
}
