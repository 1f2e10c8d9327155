// The attention explorer: the map of one head, or of two models side by side, and the weights under the pointer.
function decode(head) {
  if (!head.decoded) {
    const bytes = Uint8Array.from(atob(head.weights), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    head.decoded = Float32Array.from({ length: bytes.length / 4 }, (_, place) => view.getFloat32(4 * place, true));
  }
  return head.decoded;
}

function weightAt(head, query, key) {
  return key > query ? null : decode(head)[query * (query + 1) / 2 + key];
}

const SCALES = {
  linear: (share) => share,
  'square root': (share) => Math.sqrt(share),
  logarithm: (share) => Math.max(0, 1 + Math.log10(share) / 5),
};

function palette() {
  return { stops: ['--map-low', '--map-mid', '--map-high'].map(colourOf), paper: rgb(colourOf('--paper')), hidden: rgb(colourOf('--hidden')) };
}

// Writes each pixel as one 32-bit number, for speed: a model of 144 heads has half a million cells.
function pixel([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}

function paint(canvas, head, size, scale, marked) {
  const { stops, paper, hidden } = palette();
  const steps = Uint32Array.from({ length: 256 }, (_, place) => pixel(between(stops, place / 255)));
  const [blank, unseen] = [pixel(paper), pixel(marked ? hidden : paper)];
  const weights = decode(head);
  const share = SCALES[scale];
  canvas.width = canvas.height = size;
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer).fill(unseen);
  let place = 0;
  for (let query = 0; query < size; query += 1) {
    for (let key = 0; key <= query; key += 1, place += 1) {
      const weight = weights[place];
      pixels[query * size + key] = weight > 0 ? steps[Math.round(255 * share(Math.min(1, weight / head.largest)))] : blank;
    }
  }
  pen.putImageData(image, 0, 0);
}

function visible(token) {
  return token.replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/ /g, '␣') || '∅';
}

function sameTokens(one, other) {
  return one.cell === other.cell && one.tokens.length === other.tokens.length && one.tokens.every((token, place) => token === other.tokens[place]);
}

function beginning(text) {
  const line = text.replace(/\s+/g, ' ').trim();
  return line.length > 40 ? `“${line.slice(0, 40)}…”` : `“${line}”`;
}

function explorer(holder, data) {
  const state = { scale: 'square root', linked: true, comparable: true };
  const panels = make('div', { class: 'panels' });
  const scales = select('Colour scale', Object.keys(SCALES).map((name) => [name, name]), (value) => {
    state.scale = value;
    all.forEach((panel) => panel.paintAll());
  });
  scales.box.value = state.scale;
  const linked = make('input', { type: 'checkbox' });
  linked.checked = true;
  linked.addEventListener('change', () => { state.linked = linked.checked; });
  const controls = make('div', { class: 'controls' }, scales.label);
  if (data.maps.length > 1) controls.append(make('label', { class: 'check' }, linked, 'Same layer, head and cell in both'));
  const warning = make('p', { class: 'warning', role: 'status', hidden: true });
  holder.append(controls, warning, panels);

  const all = [];
  const others = (panel) => (state.linked ? all.filter((other) => other !== panel) : []);
  // Show two maps of the same text first, if there are two.
  const partner = data.maps.findIndex((maps, place) => place > 0 && sameTokens(maps, data.maps[0]));
  const firsts = data.maps.length > 1 ? [0, Math.max(partner, 1)] : [0];
  for (const place of firsts) all.push(panelOf(data, place, state, others, compare));
  all.forEach((panel) => panels.append(panel.element));

  // Cells of different texts do not correspond.
  function compare() {
    const [one, other] = all.map((panel) => panel.maps());
    state.comparable = !other || sameTokens(one, other);
    warning.hidden = state.comparable;
    if (state.comparable) return;
    warning.textContent = one.text === other.text
      ? 'The maps show the same text in different tokens: their cells do not correspond and move separately.'
      : `The maps show different texts, ${beginning(one.text)} and ${beginning(other.text)}: their cells do not correspond and move separately.`;
  }
  all.forEach((panel) => panel.show());
  redraws.push(() => all.forEach((panel) => panel.paintAll()));
}

function panelOf(data, first, state, others, compare) {
  const panel = { element: make('section', { class: 'panel' }) };
  let maps = data.maps[first];
  let layer = maps.heads[0].layer;
  let head = maps.heads[0].head;
  const cell = { query: maps.tokens.length - 1, key: 0 };

  const texts = new Set(data.maps.map((entry) => entry.text)).size > 1;
  const named = (entry) => (texts ? `${entry.model}: ${beginning(entry.text)}` : entry.model);
  const models = select('Model', data.maps.map((entry, place) => [String(place), named(entry)]), (value) => {
    maps = data.maps[Number(value)];
    panel.show();
  });
  panel.maps = () => maps;
  models.box.value = String(first);
  const layers = select('Layer', [], (value) => panel.choose(Number(value), head, true));
  const heads = select('Head', [], (value) => panel.choose(layer, Number(value), true));
  const canvas = make('canvas', { class: 'map', role: 'img', tabindex: '0' });
  const frame = make('div', { class: 'cell', 'aria-hidden': 'true' });
  const reading = make('p', { class: 'reading', 'aria-live': 'polite' });
  const tokens = make('div', { class: 'tokens', 'aria-label': 'The text. The marked token is the query; keys are shaded by their weight.' });
  const thumbs = make('div', { class: 'thumbs', role: 'group', 'aria-label': 'All layers (rows) and heads (columns)' });
  const summary = make('p', { class: 'hint' });
  const about = make('p', { class: 'hint' }, 'All layers (rows) and heads (columns); choose one:');
  panel.element.append(
    make('div', { class: 'controls' }, models.label, layers.label, heads.label), make('div', { class: 'frame' }, canvas, frame), reading, summary, tokens, about, thumbs,
  );

  const current = () => maps.heads.find((entry) => entry.layer === layer && entry.head === head);
  const unique = (name) => [...new Set(maps.heads.map((entry) => entry[name]))].sort((a, b) => a - b);

  panel.show = () => {
    compare();
    if (!current()) {
      layer = maps.heads[0].layer;
      head = maps.heads[0].head;
    }
    for (const [box, values, chosen] of [[layers.box, unique('layer'), layer], [heads.box, unique('head'), head]]) {
      clear(box).append(...values.map((value) => make('option', { value }, String(value))));
      box.value = String(chosen);
    }
    cell.query = Math.min(cell.query, maps.tokens.length - 1);
    cell.key = Math.min(cell.key, cell.query);
    clear(tokens).append(...maps.tokens.map((token, place) => {
      const span = make('span', {}, visible(token));
      span.addEventListener('pointerenter', () => panel.read(place, Math.min(cell.key, place), true));
      span.addEventListener('click', () => panel.read(place, Math.min(cell.key, place), true));
      return span;
    }));
    const columns = unique('head').length;
    thumbs.style.gridTemplateColumns = `repeat(${columns}, minmax(22px, 64px))`;
    clear(thumbs).append(...maps.heads.map((entry) => {
      const button = make('button', { type: 'button', 'aria-label': `Layer ${entry.layer}, head ${entry.head}`, title: `layer ${entry.layer}, head ${entry.head}` }, make('canvas', {}));
      button.addEventListener('click', () => panel.choose(entry.layer, entry.head, true));
      return button;
    }));
    panel.paintAll();
  };

  panel.choose = (newLayer, newHead, spread) => {
    if (!maps.heads.some((entry) => entry.layer === newLayer && entry.head === newHead)) return;
    layer = newLayer;
    head = newHead;
    layers.box.value = String(layer);
    heads.box.value = String(head);
    panel.paintMap();
    if (spread) others(panel).forEach((other) => other.choose(layer, head, false));
  };

  panel.paintAll = () => {
    maps.heads.forEach((entry, place) => paint(thumbs.children[place].firstChild, entry, maps.tokens.length, state.scale, false));
    panel.paintMap();
  };

  panel.paintMap = () => {
    const entry = current();
    paint(canvas, entry, maps.tokens.length, state.scale, true);
    canvas.setAttribute('aria-label', `Attention of ${maps.model}, layer ${layer}, head ${head}. Arrow keys select a weight.`);
    canvas.dataset.layer = layer;
    canvas.dataset.head = head;
    maps.heads.forEach((other, place) => thumbs.children[place].setAttribute('aria-pressed', String(other === entry)));
    const weights = decode(entry);
    const zeros = weights.reduce((count, weight) => count + (weight === 0 ? 1 : 0), 0);
    const unit = maps.cell > 1 ? ` A cell covers ${maps.cell} tokens in each direction.` : '';
    summary.textContent = `Largest weight ${shown(Number(entry.largest))}; ${shown(zeros / weights.length, true)} of the weights are exactly 0.${unit}`;
    panel.read(cell.query, cell.key, false);
  };

  panel.read = (query, key, spread) => {
    const size = maps.tokens.length;
    cell.query = Math.max(0, Math.min(size - 1, query));
    cell.key = Math.max(0, Math.min(cell.query, key));
    const entry = current();
    const weight = weightAt(entry, cell.query, cell.key);
    const name = (place) => `${place} “${visible(maps.tokens[place])}”`;
    reading.textContent = `Query ${name(cell.query)}, key ${name(cell.key)}: ${weight === 0 ? 'exactly 0' : shown(Number(weight.toPrecision(4)))}`;
    frame.style.left = `${100 * cell.key / size}%`;
    frame.style.top = `${100 * cell.query / size}%`;
    frame.style.width = frame.style.height = `${100 / size}%`;
    const { stops } = palette();
    [...tokens.children].forEach((span, place) => {
      const value = place <= cell.query ? weightAt(entry, cell.query, place) : 0;
      const channels = value > 0 ? between(stops, SCALES[state.scale](value / entry.largest)) : null;
      span.style.background = channels ? cssColour(channels) : 'none';
      span.style.color = channels ? (isDark(channels) ? '#ffffff' : '#000000') : '';
      span.style.borderBottomColor = place === cell.key ? 'currentColor' : 'transparent';
      span.classList.toggle('query', place === cell.query);
      span.classList.toggle('later', place > cell.query);
    });
    if (spread && state.comparable) others(panel).forEach((other) => other.read(cell.query, cell.key, false));
  };

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const size = maps.tokens.length;
    const query = Math.floor((event.clientY - box.top - canvas.clientTop) / canvas.clientHeight * size);
    const key = Math.floor((event.clientX - box.left - canvas.clientLeft) / canvas.clientWidth * size);
    if (query >= 0 && query < size && key >= 0 && key <= query) panel.read(query, key, true);
  };
  canvas.addEventListener('pointermove', under);
  canvas.addEventListener('pointerdown', under);
  canvas.addEventListener('keydown', (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    panel.read(cell.query + step[0], cell.key + step[1], true);
  });
  return panel;
}

document.querySelectorAll('.plot').forEach((holder) => {
  const figure = DATA.figures[holder.dataset.figure];
  if (figure.kind === 'heat') heatMap(holder, figure);
  else lineChart(holder, figure);
});
document.querySelectorAll('.explorer').forEach((holder) => explorer(holder, DATA.explorers[Number(holder.dataset.explorer)]));
themeButton();
