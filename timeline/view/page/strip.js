// The run strip: how long each step took, and for how much of it a rank held up all others.

import { $, channels, color, el, hatch } from './dom.js';
import { duration } from './format.js';

const shown = 4; // ranks with a colour of their own

// lastOf returns the number of the last step for which an entry of the list of steps stands.
function lastOf(s) { return s.number + s.steps - 1; }

// strip connects the strip with the page. choose is called with the steps that are brushed.
export function strip(choose) {
  const place = $('strip');
  let steps = [], own = [], first = 0, numbers = [], lengths = [], stacks = [];
  const length = $('strip-legend').firstElementChild;
  let plot;

  // update shows a report.
  function update(report) {
    steps = report.steps_shown;
    $('brush').hidden = !steps.length;
    if (!steps.length) {
      plot?.destroy();
      plot = undefined;
      place.textContent = 'There are no steps, because no tensor name occurs more than once.';
      return;
    }
    const worst = report.lateness.ranks.filter(r => r.held_us > 0).sort((a, b) => b.held_us - a.held_us);
    own = worst.slice(0, shown).map(r => r.rank);
    first = steps[0].number;
    numbers = steps.map((s, i) => first + i); // program numbers may repeat
    lengths = steps.map(s => s.us / s.steps / 1000);
    // The ranks are stacked: each line is drawn over the one with one rank more.
    stacks = [...own, 'others'].map(() => []);
    for (const s of steps) {
      let sum = 0;
      [...own, 'others'].forEach((rank, i) => {
        for (const h of s.held) if (rank === 'others' ? !own.includes(h.rank) : h.rank === rank) sum += h.us;
        stacks[i].push(sum / s.steps / 1000);
      });
    }
    if (document.activeElement?.closest('#brush') === null) {
      $('brush-from').value = steps[0].number;
      $('brush-to').value = lastOf(steps.at(-1));
    }
    const legend = own.map((rank, i) => el('li', {}, el('span', { class: 'swatch series-' + i, 'aria-hidden': 'true' }), `rank ${rank} held up all others`));
    if (worst.length > shown) {
      legend.push(el('li', {}, el('span', { class: 'swatch series-' + own.length, 'aria-hidden': 'true' }), 'other ranks'));
    }
    $('strip-legend').replaceChildren(length, ...legend);
    make();
  }

  function make() {
    if (!steps.length) return;
    plot?.destroy();
    place.replaceChildren();
    const c = document.createElement('canvas').getContext('2d');
    const fill = i => {
      const line = color('series-' + i);
      const ground = 'rgb(' + channels(line).join(' ') + ' / 0.45)';
      return i % 2 ? hatch(c, line, ground) : line;
    };
    const width = Math.min(40, Math.max(1, (place.clientWidth - 80) / steps.length * 0.8));
    const bars = uPlot.paths.bars({ size: [0.8, width] });
    const series = [{ label: 'step' }];
    for (let i = own.length; i >= 0; i--) {
      series.push({ label: 'held', fill: fill(i), stroke: color('series-' + i), width: 0, paths: bars, points: { show: false } });
    }
    series.push({ label: 'length', stroke: color('text'), width: 1.5, points: { show: steps.length < 60, size: 4, fill: color('text') } });
    const axis = { stroke: color('text'), grid: { stroke: color('line'), width: 1 }, ticks: { stroke: color('line'), width: 1 },
      font: '11px system-ui, "DejaVu Sans", sans-serif' };
    plot = new uPlot({
      width: place.clientWidth, height: 190, legend: { show: false },
      scales: { x: { time: false, range: (u, a, b) => [a - 0.6, b + 0.6] }, y: { range: (u, a, b) => [0, b * 1.08 || 1] } },
      axes: [{ ...axis, size: 34, values: (u, all) => all.map(v => steps[v - first]?.number ?? ''), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
        { ...axis, size: 64, values: (u, all) => all.map(v => duration(v * 1000)) }],
      series,
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      hooks: {
        setSelect: [u => {
          if (u.select.width < 3) return;
          const a = Math.max(Math.round(u.posToVal(u.select.left, 'x')) - first + 1, 1);
          const b = Math.min(Math.round(u.posToVal(u.select.left + u.select.width, 'x')) - first + 1, steps.length);
          if (b >= a) brush(a, b);
        }],
        setCursor: [u => {
          const s = steps[u.cursor.idx];
          $('strip-note').textContent = s ? describe(s) : '';
        }],
      },
    }, [numbers, ...stacks.toReversed(), lengths], place);
  }

  function describe(s) {
    const held = s.held.map(h => `rank ${h.rank} held up all others for ${duration(h.us)}`).join(', ');
    return `${s.name}: ${duration(s.us)}; ` + (held || 'no rank held up all others');
  }

  function brush(a, b) {
    $('brush-from').value = steps[a - 1].number;
    $('brush-to').value = lastOf(steps[b - 1]);
    const last = steps[b - 1];
    choose(steps[a - 1].begin_us, last.begin_us + last.us);
  }

  $('brush').addEventListener('submit', e => {
    e.preventDefault();
    const [from, to] = [Number($('brush-from').value), Number($('brush-to').value)];
    const a = steps.findIndex(s => lastOf(s) >= from) + 1 || steps.length;
    const b = steps.findLastIndex(s => s.number <= to) + 1;
    brush(a, Math.max(a, b));
  });
  new ResizeObserver(() => plot?.setSize({ width: place.clientWidth, height: 190 })).observe(place);
  return { theme: make, update };
}
