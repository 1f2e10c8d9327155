// Text from files is only set through textContent and setAttribute, never as HTML.
const DATA = JSON.parse(document.getElementById('report-data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const LOOKS = 8;
const DASHES = ['', '7 4', '', '8 3 2 3', '2 3', '10 3', '5 2 2 2 2 2', '3 2'];
const REFERENCES = ['2 4', '8 3 2 3', '9 3', '1 6'];
const CIVIDIS = ['#00224e', '#123570', '#3b496c', '#575d6d', '#707173', '#8a8678', '#a59c74', '#c3b369', '#e1cc55', '#fee838'];
const redraws = [];

function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children) element.append(child);
  return element;
}

function clear(element) {
  element.replaceChildren();
  return element;
}

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function rgb(hex) {
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

function between(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const [from, to] = [rgb(stops[low]), rgb(stops[low + 1])];
  return from.map((value, channel) => Math.round(value + (to[channel] - value) * (place - low)));
}

function cssColour(channels) {
  return `rgb(${channels.join(',')})`;
}

function isDark(channels) {
  return channels[0] * 0.299 + channels[1] * 0.587 + channels[2] * 0.114 < 128;
}

// Percentages below 1 have two significant digits: 0.036, not 0.0.
function percentWords(share) {
  const size = Math.abs(100 * share);
  if (size === 0 || size >= 9.95) return (100 * share).toFixed(0);
  if (size >= 0.995) return (100 * share).toFixed(1);
  return size >= 1e-4 ? String(Number((100 * share).toPrecision(2))) : (100 * share).toExponential(0);
}

function shown(value, percent) {
  if (value === null || value === undefined) return '–';
  if (percent) return `${percentWords(value)}%`;
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

function select(label, choices, onChoose) {
  const box = make('select');
  choices.forEach(([value, words]) => box.append(make('option', { value }, words)));
  box.addEventListener('change', () => onChoose(box.value));
  return { box, label: make('label', {}, label, box) };
}

// Auto follows the system; the choice is saved if the browser has storage for local files.
function themeButton() {
  const button = document.getElementById('theme');
  const themes = ['auto', 'light', 'dark'];
  let chosen = 'auto';
  try { chosen = localStorage.getItem('softplus-attention-theme') || 'auto'; } catch { /* no storage for files */ }
  const apply = () => {
    if (chosen === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
    redraws.forEach((redraw) => redraw());
  };
  button.hidden = false;
  button.addEventListener('click', () => {
    chosen = themes[(themes.indexOf(chosen) + 1) % themes.length];
    try { localStorage.setItem('softplus-attention-theme', chosen); } catch { /* as above */ }
    apply();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => redraws.forEach((redraw) => redraw()));
  if (!themes.includes(chosen)) chosen = 'auto';
  apply();
}

// Draws now and whenever the width changes; drawing itself changes the height, which must not start it again.
function drawByWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.round(element.clientWidth);
    if (now && now !== width) {
      width = now;
      draw(width);
    }
  }).observe(element);
}
