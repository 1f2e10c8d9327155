// Line charts, bars and heat maps, drawn as SVG at the available width, so that text keeps its size on a phone.
const MARKS = [
  (x, y) => `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`,
  (x, y) => `M${x - 4},${y - 4}h8v8h-8z`,
  (x, y) => `M${x},${y - 5}l5,5l-5,5l-5,-5z`,
  (x, y) => `M${x},${y - 5}l5,9h-10z`,
  (x, y) => `M${x},${y + 5}l5,-9h-10z`,
  (x, y) => `M${x - 5},${y - 2}h3v-3h4v3h3v4h-3v3h-4v-3h-3z`,
  (x, y) => `M${x - 5},${y - 3}l2,-2l3,3l3,-3l2,2l-3,3l3,3l-2,2l-3,-3l-3,3l-2,-2l3,-3z`,
  (x, y) => `M${x},${y - 6}l2,4l4,1l-3,3l1,4l-4,-2l-4,2l1,-4l-3,-3l4,-1z`,
];

function niceTicks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) ticks.push(place * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  const fine = high / low < 40 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    fine.forEach((factor) => ticks.push(factor * 10 ** power));
  }
  return ticks.filter((tick) => tick >= low / 1.0001 && tick <= high * 1.0001);
}

function limits(figure, visible) {
  const values = [];
  for (const series of visible) {
    series.y.forEach((value, place) => {
      if (value === null) return;
      const error = series.error && series.error[place] ? series.error[place] : 0;
      values.push(value - error, value + error);
    });
    (series.band || []).forEach((end) => values.push(...end.filter((value) => value !== null)));
  }
  if (figure.places) values.push(0);
  if (figure.baseline !== undefined) values.push(figure.baseline);
  const usable = figure.y_scale === 'log' ? values.filter((value) => value > 0) : values;
  let low = usable.length ? Math.min(...usable) : 0;
  let high = usable.length ? Math.max(...usable) : 1;
  if (figure.y_scale === 'log') return [low / 1.15, high * 1.15];
  const space = (high - low) * 0.06 || Math.abs(high) * 0.06 || 0.5;
  const [bottom, top] = figure.y_range;
  low = bottom === null ? low - space : Math.min(bottom, low);
  high = top === null ? high + space : Math.max(top, high);
  // Keep lines at the limit off the axis.
  if (bottom !== null) low -= (high - low) * 0.04;
  if (top !== null) high += (high - low) * 0.03;
  return [low, high > low ? high : low + 1];
}

function seriesColour(series) {
  return series.reference ? 'var(--reference)' : `var(--s${series.look % LOOKS})`;
}

function isHollow(series) {
  return series.dashed || Math.floor(series.look / LOOKS) % 2 === 1;
}

function seriesDash(series) {
  if (series.reference) return REFERENCES[series.look % REFERENCES.length];
  return isHollow(series) ? '4 4' : DASHES[series.look % LOOKS];
}

function lineChart(holder, figure) {
  const hidden = new Set();
  const places = [...new Set(figure.series.flatMap((series) => series.x))].sort((a, b) => a - b);
  let chosen = -1;
  const plot = make('div');
  const legend = make('ul', { class: 'legend' });
  const reading = make('p', { class: 'reading', 'aria-live': 'polite' });
  holder.append(plot, legend, reading);
  if (!places.length) {
    reading.textContent = 'No numbers to draw.';
    return;
  }
  const values = figure.series.map((series, number) => {
    const value = make('span', { class: 'value' });
    const line = shape('path', { d: 'M1,7H33', class: 'line', 'stroke-dasharray': seriesDash(series) });
    line.style.stroke = seriesColour(series);
    const swatch = shape('svg', { viewBox: '0 0 34 14', 'aria-hidden': 'true', class: 'swatch' }, line);
    if (!series.reference) swatch.append(mark(series, 17, 7));
    const button = make('button', { type: 'button', 'aria-pressed': 'true' }, swatch, make('span', {}, series.name), value);
    button.addEventListener('click', () => {
      if (hidden.has(number)) hidden.delete(number);
      else hidden.add(number);
      button.setAttribute('aria-pressed', String(!hidden.has(number)));
      button.classList.toggle('off', hidden.has(number));
      draw(plot.clientWidth);
    });
    legend.append(make('li', {}, button));
    return value;
  });

  function words(x) {
    return figure.places ? figure.places[x].replace('\n', ', ') : shown(x) + (figure.times_of ? ` (${shown(x / figure.times_of)}x)` : '');
  }

  function choose(place, aloud) {
    chosen = Math.max(0, Math.min(places.length - 1, place));
    const x = places[chosen];
    const said = [];
    figure.series.forEach((series, number) => {
      const at = series.x.indexOf(x);
      const value = at < 0 ? null : series.y[at];
      const error = at >= 0 && series.error ? series.error[at] : null;
      values[number].textContent = shown(value) + (error ? ` ± ${shown(error)}` : '');
      if (!hidden.has(number) && value !== null) said.push(`${series.name} ${shown(value)}`);
    });
    reading.textContent = `${figure.x_label ? `${figure.x_label}: ` : ''}${words(x)}` + (aloud ? `; ${said.join(', ')}` : '');
    plot.querySelector('.cursor').setAttribute('transform', `translate(${scaleX(x)},0)`);
    plot.querySelector('.cursor').removeAttribute('visibility');
  }

  let scaleX = () => 0;
  function draw(width) {
    const visible = figure.series.filter((_, number) => !hidden.has(number));
    const height = Math.round(Math.min(Math.max(width * 0.58, 220), 360));
    const [low, high] = limits(figure, visible);
    const logY = figure.y_scale === 'log' && low > 0;
    const ticks = (logY ? logTicks(low, high) : niceTicks(low, high, 6)).map((tick) => [tick, shown(Number(tick.toPrecision(6)))]);
    const widest = Math.max(1, ...ticks.map(([, label]) => label.length));
    const labels = new Map(places.map((x) => [x, figure.places ? figure.places[x].split('\n') : tickLabel(x)]));
    const deepest = Math.max(...[...labels.values()].map((label) => label.length));
    const [left, right, top, bottom] = [32 + 7.5 * widest, 14, 10, 32 + 14 * deepest];
    const isLog = figure.x_scale === 'log2' && places[0] > 0;
    const position = isLog ? Math.log2 : (x) => x;
    const [first, last] = [position(places[0]), position(places[places.length - 1])];
    const span = last - first || 1;
    const inner = width - left - right - 24;
    const slot = inner / places.length;
    scaleX = figure.places ? (x) => left + 12 + (places.indexOf(x) + 0.5) * slot : (x) => left + 12 + (last === first ? 0.5 : (position(x) - first) / span) * inner;
    const share = logY ? (y) => Math.log(y / low) / Math.log(high / low) : (y) => (y - low) / (high - low);
    const scaleY = (y) => height - bottom - share(y) * (height - top - bottom);

    const svg = shape('svg', {
      viewBox: `0 0 ${width} ${height}`, role: 'img', tabindex: '0',
      'aria-label': `${figure.title}. ${figure.y_label} against ${figure.x_label}. Left and right arrows read the values.`,
    });
    for (const [tick, label] of ticks) {
      const y = scaleY(tick);
      svg.append(shape('line', { class: 'grid', x1: left, x2: width - right, y1: y, y2: y }));
      svg.append(shape('text', { x: left - 7, y: y + 4, 'text-anchor': 'end' }, label));
    }
    let free = -Infinity;
    for (const x of figure.places || isLog || places.length <= 24 ? places : niceTicks(places[0], places[places.length - 1], 10)) {
      const at = scaleX(x);
      const label = labels.get(x) || tickLabel(x);
      const half = Math.max(...label.map((part) => part.length * 3.8), 9);
      if (at - half < free) continue;
      free = at + half + 5;
      svg.append(shape('line', { class: 'axis', x1: at, x2: at, y1: height - bottom, y2: height - bottom + 5 }));
      label.forEach((part, line) => {
        svg.append(shape('text', { x: at, y: height - bottom + 18 + 14 * line, 'text-anchor': 'middle' }, part));
      });
    }
    svg.append(shape('line', { class: 'axis', x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    svg.append(shape('text', { class: 'axis-title', x: left + (width - left - right) / 2, y: height - 5, 'text-anchor': 'middle' }, figure.x_label));
    const middle = top + (height - top - bottom) / 2;
    svg.append(shape('text', { class: 'axis-title', transform: `translate(13,${middle}) rotate(-90)`, 'text-anchor': 'middle' }, figure.y_label));
    if (figure.baseline !== undefined) {
      svg.append(shape('line', { class: 'baseline', x1: left, x2: width - right, y1: scaleY(figure.baseline), y2: scaleY(figure.baseline) }));
    }
    svg.append(shape('g', { class: 'cursor', visibility: 'hidden' }, shape('line', { x1: 0, x2: 0, y1: top, y2: height - bottom })));
    visible.forEach((series, number) => {
      const wide = 0.8 * slot / visible.length;
      const offset = (number - (visible.length - 1) / 2) * wide;
      svg.append(figure.places ? barShapes(series, (x) => scaleX(x) + offset, scaleY, wide) : seriesShape(series, scaleX, scaleY, logY));
    });
    svg.addEventListener('pointermove', (event) => choose(nearest(event, svg, width), false));
    svg.addEventListener('pointerdown', (event) => choose(nearest(event, svg, width), false));
    svg.addEventListener('keydown', (event) => {
      const moves = { ArrowRight: chosen + 1, ArrowLeft: chosen < 0 ? 0 : chosen - 1, Home: 0, End: places.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      choose(moves[event.key], true);
    });
    const focused = plot.contains(document.activeElement);
    clear(plot).append(svg);
    if (focused) svg.focus();
    if (chosen >= 0) choose(chosen, false);
  }

  function tickLabel(x) {
    return [shown(x), ...(figure.times_of ? [`${shown(Number((x / figure.times_of).toPrecision(3)))}x`] : [])];
  }

  function nearest(event, svg, width) {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * width / box.width;
    const distances = places.map((x) => Math.abs(scaleX(x) - at));
    return distances.indexOf(Math.min(...distances));
  }

  drawByWidth(plot, draw);
}

function mark(series, x, y) {
  const path = shape('path', { d: MARKS[series.look % LOOKS](x, y) });
  path.style.fill = isHollow(series) ? 'var(--paper)' : seriesColour(series);
  path.style.stroke = seriesColour(series);
  return path;
}

function errorBar(series, x, scaleY, low, high) {
  const bar = shape('line', { class: 'bar', x1: x, x2: x, y1: scaleY(low), y2: scaleY(high) });
  bar.style.stroke = seriesColour(series);
  return bar;
}

function barShapes(series, scaleX, scaleY, wide) {
  const group = shape('g', { class: 'series' });
  series.x.forEach((x, place) => {
    const value = series.y[place];
    if (value === null) return;
    const [at, ends] = [scaleX(x), [scaleY(value), scaleY(0)].sort((a, b) => a - b)];
    const bar = shape('rect', { x: at - 0.46 * wide, y: ends[0], width: 0.92 * wide, height: ends[1] - ends[0] });
    bar.style.fill = seriesColour(series);
    group.append(bar);
    const error = series.error ? series.error[place] : null;
    if (error) {
      const line = errorBar(series, at, scaleY, value - error, value + error);
      line.style.stroke = 'var(--ink)';
      group.append(line);
    }
  });
  return group;
}

// The band of the middle half of the values, without missing ones.
function bandShape(series, scaleX, scaleY) {
  const there = series.x.map((x, place) => [x, series.band[0][place], series.band[1][place]]).filter(([, low, high]) => low !== null && high !== null);
  const ends = [...there.map(([x, , high]) => [x, high]), ...there.reverse().map(([x, low]) => [x, low])];
  const area = shape('polygon', { class: 'band', points: ends.map(([x, y]) => `${scaleX(x).toFixed(1)},${scaleY(y).toFixed(1)}`).join(' ') });
  area.style.fill = seriesColour(series);
  return area;
}

function seriesShape(series, scaleX, scaleY, logY) {
  const group = shape('g', { class: 'series' });
  const usable = (value) => value !== null && (!logY || value > 0);
  if (series.band && !logY) group.append(bandShape(series, scaleX, scaleY));
  let path = '';
  let pen = false;
  const marks = [];
  series.x.forEach((x, place) => {
    const value = series.y[place];
    if (!usable(value)) {
      pen = false;
      return;
    }
    const [at, high] = [scaleX(x), scaleY(value)];
    path += `${pen ? 'L' : 'M'}${at.toFixed(1)},${high.toFixed(1)}`;
    pen = true;
    const error = series.error ? series.error[place] : null;
    if (error && usable(value - error)) {
      group.append(errorBar(series, at, scaleY, value - error, value + error));
    }
    if (!series.reference) marks.push(mark(series, at, high));
  });
  const line = shape('path', { class: 'line', d: path, 'stroke-dasharray': seriesDash(series) });
  line.style.stroke = seriesColour(series);
  group.append(line, ...marks);
  return group;
}

function heatMap(holder, figure) {
  const plot = make('div');
  const reading = make('p', { class: 'reading', 'aria-live': 'polite' });
  const ramp = make('canvas', { width: 100, height: 1, 'aria-hidden': 'true' });
  const pen = ramp.getContext('2d');
  for (let place = 0; place < 100; place += 1) {
    pen.fillStyle = cssColour(between(CIVIDIS, place / 99));
    pen.fillRect(place, 0, 1, 1);
  }
  const ends = [figure.low, figure.high].map((value) => shown(value, figure.percent));
  const legend = make('div', { class: 'ramp' }, ends[0], ramp, `${ends[1]} ${figure.value_label}`);
  holder.append(plot, legend, reading);
  const chosen = { row: 0, column: 0 };
  const longestCell = Math.max(1, ...figure.values.flat().map((value) => cellText(value).length));

  function draw(width) {
    const [rows, columns] = [figure.rows.length, figure.columns.length];
    const longest = Math.max(...figure.rows.map((name) => name.length));
    const [left, top, bottom] = [Math.min(28 + longest * 7.5, width / 3), 6, 30 + 13 * Math.max(...figure.columns.map((name) => name.split('\n').length))];
    const cellWidth = Math.min((width - left - 8) / columns, 90);
    const cellHeight = Math.max(18, Math.min(34, cellWidth * 0.7));
    // Smaller if the longest does not fit, and none if they would be too small: pointing shows every value.
    const textSize = Math.min(12, (cellWidth - 4) / (0.6 * longestCell));
    const height = top + rows * cellHeight + bottom;
    const svg = shape('svg', {
      viewBox: `0 0 ${width} ${height}`, role: 'img', tabindex: '0',
      'aria-label': `${figure.title}. ${figure.value_label} by ${figure.y_label} and ${figure.x_label}. Arrow keys read the cells.`,
    });
    figure.values.forEach((line, row) => line.forEach((value, column) => {
      const [x, y] = [left + column * cellWidth, top + row * cellHeight];
      const cell = shape('rect', { class: value === null ? 'empty' : 'cell', x: x + 1, y: y + 1, width: cellWidth - 2, height: cellHeight - 2, rx: 2 });
      const channels = value === null ? null : between(CIVIDIS, (value - figure.low) / (figure.high - figure.low || 1));
      if (channels) cell.style.fill = cssColour(channels);
      svg.append(cell);
      if (textSize >= 8) {
        const label = shape('text', { class: 'number', x: x + cellWidth / 2, y: y + cellHeight / 2 + 4, 'text-anchor': 'middle' }, cellText(value));
        label.style.fontSize = `${textSize}px`;
        if (channels) label.style.fill = isDark(channels) ? '#ffffff' : '#000000';
        svg.append(label);
      }
    }));
    figure.rows.forEach((name, row) => {
      svg.append(shape('text', { x: left - 6, y: top + (row + 0.5) * cellHeight + 4, 'text-anchor': 'end' }, name));
    });
    let free = -Infinity;
    figure.columns.forEach((name, column) => {
      const at = left + (column + 0.5) * cellWidth;
      const half = Math.max(...name.split('\n').map((part) => part.length)) * 3.6;
      if (at - half < free) return;
      free = at + half + 3;
      name.split('\n').forEach((part, line) => {
        svg.append(shape('text', { x: at, y: top + rows * cellHeight + 15 + 13 * line, 'text-anchor': 'middle' }, part));
      });
    });
    svg.append(shape('text', { class: 'axis-title', x: left + columns * cellWidth / 2, y: height - 8, 'text-anchor': 'middle' }, figure.x_label));
    svg.append(shape('text', { class: 'axis-title', transform: `translate(12,${top + rows * cellHeight / 2}) rotate(-90)`, 'text-anchor': 'middle' }, figure.y_label));
    const frame = shape('rect', { class: 'chosen', width: cellWidth, height: cellHeight, rx: 3, visibility: 'hidden' });
    svg.append(frame);

    function choose(row, column) {
      chosen.row = Math.max(0, Math.min(rows - 1, row));
      chosen.column = Math.max(0, Math.min(columns - 1, column));
      frame.setAttribute('x', left + chosen.column * cellWidth);
      frame.setAttribute('y', top + chosen.row * cellHeight);
      frame.removeAttribute('visibility');
      const value = figure.values[chosen.row][chosen.column];
      const place = `${figure.y_label} ${figure.rows[chosen.row]}, ${figure.x_label} ${figure.columns[chosen.column].replace('\n', ', ')}`;
      reading.textContent = `${place}: ${figure.value_label} ${shown(value, figure.percent)}`;
    }
    const under = (event) => {
      const box = svg.getBoundingClientRect();
      const unit = width / box.width;
      const column = Math.floor(((event.clientX - box.left) * unit - left) / cellWidth);
      const row = Math.floor(((event.clientY - box.top) * unit - top) / cellHeight);
      if (row >= 0 && row < rows && column >= 0 && column < columns) choose(row, column);
    };
    svg.addEventListener('pointermove', under);
    svg.addEventListener('pointerdown', under);
    svg.addEventListener('keydown', (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      choose(chosen.row + step[0], chosen.column + step[1]);
    });
    const focused = plot.contains(document.activeElement);
    clear(plot).append(svg);
    if (focused) svg.focus();
  }

  function cellText(value) {
    if (value === null) return '–';
    if (figure.percent) return percentWords(value);
    return String(Number(value.toPrecision(2)));
  }

  drawByWidth(plot, draw);
}
