// Pictures of cells: the heat map of ranks and steps, and who waited for whom.

import { $, channels, color, el, fit, say } from './dom.js';
import { grid } from './data.js';
import { duration, plain } from './format.js';

// Cells is a picture of cells that the pointer and the keys can read. describe returns the text for a cell, and
// choose is called for the cell that is clicked.
class Cells {
  constructor(canvas, { left, top, size, describe, choose, decorate }) {
    Object.assign(this, { canvas, left, top, size, describe, choose, decorate });
    this.at = null;
    canvas.addEventListener('pointermove', e => this.point(this.cell(e), e));
    canvas.addEventListener('pointerleave', () => this.point(null));
    canvas.addEventListener('click', e => {
      const at = this.cell(e);
      if (at) this.choose(...at);
    });
    canvas.addEventListener('keydown', e => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key];
      if (step && this.data) {
        const [r, k] = this.at ?? [0, 0];
        this.at = [Math.max(0, Math.min(this.data.rows - 1, r + step[0])),
          Math.max(0, Math.min(this.data.columns - 1, k + step[1]))];
        this.draw();
        say(this.text(...this.at));
        e.preventDefault();
      } else if (e.key === 'Enter' && this.at && this.data) {
        this.choose(...this.at);
        e.preventDefault();
      }
    });
    canvas.addEventListener('blur', () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  text(row, column) { return this.describe(row, column, this.data.cells[row * this.data.columns + column]); }

  cell(e) {
    if (!this.data) return null;
    const column = Math.floor((e.offsetX - this.left()) / this.width);
    const row = Math.floor((e.offsetY - this.top()) / this.height);
    return row >= 0 && column >= 0 && row < this.data.rows && column < this.data.columns ? [row, column] : null;
  }

  point(at) {
    this.at = at;
    this.draw();
  }

  // show shows cells. The full colour is that of the greatest number, or of least if no number is as great.
  show(data, least) {
    this.data = data;
    if (this.at?.[0] >= data.rows || this.at?.[1] >= data.columns) this.at = null; // the cell is there no more
    this.most = least;
    for (const v of data.cells) if (v > this.most) this.most = v;
    this.draw();
  }

  draw() {
    if (!this.data || !this.canvas.clientWidth) return;
    const { rows, columns, cells } = this.data;
    const all = this.canvas.clientWidth;
    [this.width, this.height] = this.size(rows, columns, all - this.left());
    const height = this.top() + rows * this.height + 2;
    const c = fit(this.canvas, all, height);
    c.clearRect(0, 0, all, height);
    if (!this.picture || this.picture.of !== this.data || this.picture.theme !== color('heat')) this.make(rows, columns, cells);
    c.imageSmoothingEnabled = this.width < 1;
    c.drawImage(this.picture, this.left(), this.top(), columns * this.width, rows * this.height);
    c.strokeStyle = color('line');
    c.strokeRect(this.left() - 0.5, this.top() - 0.5, columns * this.width + 1, rows * this.height + 1);
    this.decorate(c, this);
    if (this.at) {
      const [row, column] = this.at;
      c.strokeStyle = color('focus');
      c.lineWidth = 2;
      c.strokeRect(this.left() + column * this.width, this.top() + row * this.height, Math.max(this.width, 3),
        Math.max(this.height, 3));
      this.tip(c, row, column, all, height);
    }
  }

  // make makes a bitmap with a pixel for each cell.
  make(rows, columns, cells) {
    const p = document.createElement('canvas');
    p.width = columns;
    p.height = rows;
    const c = p.getContext('2d');
    const image = c.createImageData(columns, rows);
    const cold = channels(color('cold'));
    const heat = channels(color('heat'));
    for (let i = 0; i < rows * columns; i++) {
      const part = this.most ? cells[i] / this.most : 0;
      for (let k = 0; k < 3; k++) image.data[i * 4 + k] = cold[k] + (heat[k] - cold[k]) * part;
      image.data[i * 4 + 3] = 255;
    }
    c.putImageData(image, 0, 0);
    p.of = this.data;
    p.theme = color('heat');
    this.picture = p;
  }

  // tip draws the text of a cell beside it.
  tip(c, row, column, all, height) {
    const text = this.text(row, column);
    c.font = '12px ' + font;
    const width = Math.min(c.measureText(text).width + 16, all);
    let x = this.left() + (column + 1) * this.width + 8;
    if (x + width > all) x = Math.max(0, this.left() + column * this.width - width - 8);
    const y = Math.max(0, Math.min(this.top() + row * this.height - 6, height - 26));
    c.fillStyle = color('text');
    c.fillRect(x, y, width, 24);
    c.fillStyle = color('surface');
    c.textBaseline = 'middle';
    c.textAlign = 'left';
    c.fillText(text, x + 8, y + 12, width - 16);
  }
}

const font = 'system-ui, "DejaVu Sans", sans-serif';

// rankLabels writes the names of the ranks beside their rows, or only those of the hosts if the rows are low.
function rankLabels(c, cells, info, left) {
  c.font = '12px ' + font;
  c.textBaseline = 'middle';
  c.textAlign = 'right';
  c.fillStyle = color('text');
  let free = -Infinity;
  info.ranks.forEach((r, i) => {
    const begins = i === 0 || r.host !== info.ranks[i - 1].host;
    const y = cells.top() + i * cells.height;
    if (begins && i > 0) {
      c.fillStyle = color('text');
      c.fillRect(left - 6, y - 0.5, 6, 1);
    }
    const host = begins && left > 100 && r.host ? clip(c, plain(r.host), left - 60) + '  ' : '';
    if (y - free < 12 || (cells.height < 11 && !begins && i % 16)) return;
    free = y;
    c.fillText(host + r.rank, left - 10, y + Math.max(cells.height / 2, 6));
  });
  c.textAlign = 'left';
}

function clip(c, text, width) {
  let t = text;
  while (t.length > 1 && c.measureText(t).width > width) t = t.slice(0, -2) + '…';
  return t;
}

// heatMap connects the heat map with the page.
export function heatMap(state, choose) {
  const canvas = $('heat');
  let info, report;
  const left = () => (canvas.clientWidth < 700 ? 50 : 130);
  const words = {
    caused: us => `made the others wait for ${duration(us)}, all their waiting added up`,
    held: us => `held up all others for ${duration(us)}`,
    waited: us => `waited for others for ${duration(us)}, all operations added up`,
  };
  const steps = column => {
    const first = column * info.steps_per_column + 1;
    const last = Math.min(first + info.steps_per_column - 1, report.steps_shown.length);
    const [a, b] = [report.steps_shown[first - 1], report.steps_shown[last - 1]];
    return last > first ? `${a.name} to ${b.name}` : a.name;
  };
  let shown = ''; // the metric of the cells that are shown
  const cells = new Cells(canvas, {
    left, top: () => 22,
    size: (rows, columns, width) => [Math.min(width / columns, 60), Math.max(2, Math.min(18, Math.floor(440 / rows)))],
    describe: (row, column, us) => `rank ${info.ranks[row].rank}, ${steps(column)}: ${words[shown](us)}`,
    choose: (row, column) => {
      const table = report.steps_shown;
      const first = table[column * info.steps_per_column];
      const last = table[Math.min((column + 1) * info.steps_per_column, table.length) - 1];
      choose(info.ranks[row].rank, first.begin_us, last.begin_us + last.us);
    },
    decorate: (c, self) => {
      rankLabels(c, self, info, left());
      c.fillStyle = color('quiet');
      c.font = '11px ' + font;
      c.textBaseline = 'middle';
      c.fillText('rank', Math.max(left() - 34, 2), 10);
      const gap = Math.max(1, Math.ceil(70 / self.width));
      for (let k = 0; k < self.data.columns; k += gap) {
        const label = (k ? '' : 'step ') + report.steps_shown[k * info.steps_per_column].number;
        if (left() + k * self.width + 40 < canvas.clientWidth) c.fillText(label, left() + k * self.width, 10);
      }
      const i = info.ranks.findIndex(r => String(r.rank) === state.rank);
      if (i >= 0) {
        c.strokeStyle = color('text');
        c.strokeRect(left() - 1, self.top() + i * self.height - 1, self.data.columns * self.width + 2, self.height + 2);
      }
    },
  });
  const note = $('heat-note').textContent;
  return {
    // update shows a report, at the next refresh.
    update(theInfo, theReport) {
      [info, report, this.metric] = [theInfo, theReport, undefined];
      cells.data = undefined; // until those of the report are there
      canvas.hidden = !info.columns;
      $('heat-note').textContent = info.columns ? note : 'There are no steps, because no tensor name occurs more than once.';
    },
    async refresh() {
      if (!info.columns) return;
      if (this.metric !== state.metric) {
        const metric = this.metric = state.metric;
        let data, failed;
        await grid(metric).then(d => { data = d; }, error => { failed = error; });
        if (metric !== this.metric) return; // another metric was chosen meanwhile
        canvas.hidden = !!failed; // because it shows another metric
        $('heat-note').textContent = failed ? failed.message : note;
        if (failed) {
          this.metric = undefined; // so that it is asked for again
          return;
        }
        shown = metric;
        // The full colour means at least a tenth of a step, so that small differences do not look like great ones.
        const waiters = metric === 'caused' ? info.ranks.length - 1 : 1;
        cells.show(data, report.step_us / 10 * waiters);
        $('heat-most').textContent = duration(cells.most);
      }
      cells.draw();
    },
  };
}

// matrix connects the picture of who waited for whom with the page.
export function matrix(choose) {
  const canvas = $('waits');
  let info;
  const rank = i => info.ranks[i].rank;
  const left = () => 64;
  const cells = new Cells(canvas, {
    left, top: () => 40,
    size: rows => {
      const side = Math.max(1.5, Math.min(26, Math.floor(Math.min(canvas.clientWidth - 70, 420) / rows)));
      return [side, side];
    },
    describe: (row, column, us) => `rank ${rank(row)} waited for rank ${rank(column)}: ${duration(us)}`,
    choose: (row, column) => choose(rank(column)),
    decorate: (c, self) => {
      rankLabels(c, self, info, left());
      c.fillStyle = color('text');
      c.font = '12px ' + font;
      c.textAlign = 'center';
      const gap = Math.ceil(26 / self.width);
      for (let k = 0; k < self.data.columns; k += gap) c.fillText(rank(k), left() + (k + 0.5) * self.width, 30);
      c.textAlign = 'left';
      c.fillStyle = color('quiet');
      c.fillText('… waited for rank', left(), 10);
      c.fillText('Rank …', 4, 30);
    },
  });
  return {
    // update shows a report.
    async update(theInfo, report) {
      const data = theInfo.matrix ? await grid('waits') : { rows: 0, columns: 0, cells: [] };
      info = theInfo;
      const pairs = [];
      data.cells.forEach((us, i) => { if (us > 0) pairs.push([us, rank(Math.floor(i / data.columns)), rank(i % data.columns)]); });
      pairs.sort((a, b) => b[0] - a[0]);
      $('pairs').replaceChildren(...pairs.slice(0, 10).map(([us, waiter, late]) => el('tr', {},
        el('td', {}, 'rank ' + waiter), el('td', {}, 'rank ' + late), el('td', { class: 'number' }, duration(us)))));
      $('waits-body').hidden = !pairs.length;
      $('waits-none').textContent = pairs.length ? '' : info.matrix ? 'No rank waited for another.' : 'This picture is shown for up to 256 ranks.';
      cells.show(data, report.duration_us / 10);
    },
    refresh() { cells.draw(); },
  };
}
