// The page of hvdrun view: it fetches the report and connects the parts of the page.

import { compare } from './compare.js';
import { $, el, say } from './dom.js';
import { json, setRun } from './data.js';
import { count, duration, percent, plain, sentence, size } from './format.js';
import { heatMap, matrix } from './grid.js';
import { onChange, set, setVersion, state } from './state.js';
import { follow } from './live.js';
import { strip } from './strip.js';
import * as tables from './tables.js';
import * as timeline from './timeline.js';

// ranks lists ranks, at most 16.
function ranks(all) { return all.length ? all.slice(0, 16).join(' ') + (all.length > 16 ? ' …' : '') : '-'; }

// verdict writes the sentences at the top, and the few numbers beside them.
function verdict(info, report) {
  const l = report.lateness;
  $('title').textContent = plain(info.title);
  document.title = 'Timelines: ' + plain(info.title);
  $('sentence').textContent = sentence(l.verdict);
  $('more').replaceChildren(...[l.gain, l.where, l.startup].filter(Boolean).map(t => el('li', {}, sentence(t))));
  const per = report.steps ? 'per step' : 'in total';
  const files = report.ranks_with_files.length;
  const tiles = [
    ['Step, median', report.steps ? duration(report.step_us) : '-', report.steps ? count(report.steps) + ' steps' : 'no steps'],
    ['Step, p99', report.steps ? duration(report.step_p99_us) : '-', '1 % take longer'],
    ['To be gained', duration(l.gain_us), per + ', at most'],
    ['Any rank waited', duration(l.anybody_waited_us), 'after the start-up'],
    ...(report.exposed.known ? [['Waited for results', duration(report.exposed.us_per_step), `${percent(report.exposed.share)} of communication`]] : []),
    ['Outside gohvd', percent(report.outside.share), `of a step, or more`],
    ['Ranks', count(report.size || files), report.hosts.length === 1 ? 'on one host' : `on ${report.hosts.length} hosts`],
    ['Run', duration(report.duration_us), count(report.operations) + ' operations'],
  ];
  $('numbers').replaceChildren(...tiles.map(([name, value, note]) => el('div', {},
    el('dt', {}, name), el('dd', { class: 'value' }, value), el('dd', { class: 'note' }, note))));
  $('suggestions').replaceChildren(...report.suggestions.map(s => el('li', {},
    el('strong', {}, sentence((s.setting ? s.setting + ': ' : '') + s.do)), ' ', sentence('because ' + s.because))));
  $('advice').hidden = !report.suggestions.length;
  $('pending').replaceChildren(...report.pending.slice(0, 50).map(p => el('tr', {},
    el('th', { scope: 'row', class: 'text' }, plain(p.tensor)), el('td', {}, plain(p.kind)),
    ...[p.ranks_waiting, p.ranks_missing, p.ranks_unknown].map(r => el('td', { class: 'text' }, ranks(r))),
    el('td', { class: 'number' }, duration(p.waited_us)))));
  $('pending-section').hidden = !report.pending.length;
  $('problems').replaceChildren(...report.problems.map(p => el('li', {}, sentence(p))));
  $('notes').hidden = !report.problems.length;
  $('notes-count').textContent = report.problems.length === 1 ? '1 note on the files' : `${report.problems.length} notes on the files`;
}

// detail shows the operation that is chosen.
async function detail(info) {
  const place = $('detail');
  const [rank, index] = state.op.split('.');
  if (!state.op) {
    place.hidden = true;
    return;
  }
  let o;
  try {
    o = await json('operation', { rank, index });
  } catch (error) {
    if (state.op !== `${rank}.${index}`) return;
    place.hidden = false;
    place.replaceChildren(error.message);
    return;
  }
  if (state.op !== `${rank}.${index}`) return;
  const first = o.names[0];
  const title = `${o.kind} ${plain(info.names[first] ?? '')}` + (o.tensors > 1 ? ` and ${count(o.tensors - 1)} more` : '');
  const facts = [size(o.bytes), o.backend, o.algorithm, o.set ? 'process set ' + o.set : '', o.op ? 'operation ' + o.op : ''].filter(Boolean);
  const begin = Math.min(...o.ranks.map(r => r.submitted_us));
  const head = ['rank', 'submitted', 'waited', 'granted', 'began', 'ended'];
  place.hidden = false;
  place.replaceChildren(
    el('h3', {}, title),
    el('p', {}, facts.join(', ') + (o.error ? '. It failed: ' + plain(o.error) : '.')),
    el('p', {},
      el('button', { type: 'button', click: () => set({ align: `op:${rank}.${index}`, from: '', to: '' }) }, 'Align all ranks by its grant'), ' ',
      el('button', { type: 'button', click: () => set({ rows: 'tensor:' + first, open: '' }) }, 'Show this tensor on all ranks'), ' ',
      el('button', { type: 'button', click: () => {
        timeline.show(begin, Math.max(...o.ranks.map(r => r.ended_us)), { align: '' });
      } }, 'Zoom to it'), ' ',
      el('button', { type: 'button', click: () => set({ op: '' }) }, 'Close')),
    el('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Times of the operation' }, el('table', {},
      el('caption', {}, `Times since the first submission of the operation, which was ${duration(begin)} after the first of the job`),
      el('thead', {}, el('tr', {}, ...head.map(h => el('th', { scope: 'col', class: 'number' }, h)))),
      el('tbody', {}, ...o.ranks.slice(0, 300).map(r => el('tr', { class: r.rank === o.rank ? 'marked' : false },
        el('th', { scope: 'row', class: 'number' }, r.rank),
        ...[r.submitted_us - begin, r.waited_us, r.granted_us - begin, r.begun_us - begin, r.ended_us - begin]
          .map(us => el('td', { class: 'number' }, duration(us)))))))));
}

// stepsOf returns the steps with times as in the timeline, which begin with the first submission.
function stepsOf(info, report) {
  return report.step_list.map((s, i) => ({
    ...s, index: i + 1, begin_us: s.begin_us - info.begin_us, us: s.length_us, held_us: s.any_held_us,
    name: s.steps > 1 ? `steps ${s.number} to ${s.number + s.steps - 1}` : `step ${s.number}`,
    held: s.held_us.map((us, rank) => ({ rank, us })).filter(h => h.us > 0),
  }));
}

// themes connects the switch of light and dark.
function themes(changed) {
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  const show = () => {
    const is = document.documentElement.dataset.theme ?? (dark.matches ? 'dark' : 'light');
    document.documentElement.dataset.shown = is;
    $('theme').textContent = is === 'dark' ? 'Light' : 'Dark';
    $('theme').setAttribute('aria-label', is === 'dark' ? 'Light colours' : 'Dark colours');
    changed();
  };
  dark.addEventListener('change', show);
  $('theme').addEventListener('click', () => {
    document.documentElement.dataset.theme = document.documentElement.dataset.shown === 'dark' ? 'light' : 'dark';
    show();
  });
  show();
}

// load fetches the description and the report of the present state.
async function load() {
  const info = await json('info');
  const report = await json('report');
  report.steps_shown = stepsOf(info, report);
  return [info, report];
}

async function start() {
  let [info, report] = await load();
  setRun(info.run ?? '');
  if (info.live) setVersion(info.run);
  verdict(info, report);
  if (info.compared) compare(await json('comparison'));
  const toTimeline = () => $('timeline-section').scrollIntoView({ block: 'start' });
  timeline.start(info, report);
  const line = strip((from, to) => timeline.show(from, to, { align: '' }));
  const heat = heatMap(state, (rank, from, to) => {
    timeline.show(from, to, { rank, align: '' });
    toTimeline();
  });
  const waits = matrix(rank => {
    set({ rank });
    toTimeline();
  });
  const all = tables.start(info, report, {
    rank: rank => { set({ rank, rows: 'ranks', open: rank }); toTimeline(); },
    tensor: n => { if (n !== undefined) { set({ rows: 'tensor:' + n, open: '' }); toTimeline(); } },
    step: s => { timeline.show(s.begin_us, s.begin_us + s.us, { align: '' }); toTimeline(); },
  });
  const metric = $('metric');
  metric.addEventListener('change', () => set({ metric: metric.value }));
  const refresh = async change => {
    metric.value = state.metric;
    const only = Object.keys(change).every(k => k === 'from' || k === 'to');
    if (only) {
      timeline.draw();
      return;
    }
    if ('table' in change || 'sort' in change || 'filter' in change || 'rank' in change) all.refresh();
    if ('metric' in change || 'rank' in change) heat.refresh();
    if ('op' in change) detail(info);
    await timeline.refresh();
  };
  // show shows another state of the job.
  const show = async follow => {
    [info, report] = await load();
    timeline.renew(info, report, follow);
    verdict(info, report);
    line.update(report);
    all.update(info, report);
    heat.update(info, report);
    await Promise.all([heat.refresh(), waits.update(info, report), timeline.refresh()]);
  };
  line.update(report);
  heat.update(info, report);
  await waits.update(info, report);
  const stop = info.live ? follow(show) : () => {};
  onChange(change => {
    // Back changes the whole state, of which not all need be new.
    const chosen = change === state ? state.from + state.op + state.align !== '' : ['from', 'op', 'align', 'rows'].some(k => k in change);
    if (chosen) stop(change.from === '');
    refresh(change);
  });
  themes(() => {
    line.theme();
    timeline.theme();
    heat.refresh();
    waits.refresh();
  });
  await refresh(state);
  $('loading').hidden = true;
  $('content').hidden = false;
  line.theme();
  document.documentElement.dataset.ready = 'true';
}

document.addEventListener('keydown', e => {
  const typing = e.target.closest('input, select, textarea');
  if (e.key === '?' && !typing) $('help').showModal();
});
$('help-open').addEventListener('click', () => $('help').showModal());
$('help-close').addEventListener('click', () => $('help').close());
$('skip').addEventListener('click', e => {
  e.preventDefault();
  $('tables-section').scrollIntoView();
  $('filter').focus();
});

start().catch(error => {
  $('loading').hidden = false;
  $('loading').textContent = error.message;
  say(error.message);
});
