// Elements from plain values. Text becomes text nodes and never markup, so nothing that a model writes can be more.

const SVG = 'http://www.w3.org/2000/svg';

/** An element. `props` are attributes; `on` has listeners by event; a false or missing value leaves one out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  const { on = {}, ...attributes } = props;
  for (const [name, value] of Object.entries(attributes)) set(node, name, value);
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Set an attribute, or remove it. */
export function set(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? '' : String(value));
}

/** The element with an id. */
export const byId = (id) => document.getElementById(id);

const PATHS = {
  plus: ['M12 5v14', 'M5 12h14'],
  layers: ['M12 3 3 8l9 5 9-5z', 'M3 12.5l9 5 9-5', 'M3 17l9 5 9-5'],
  sliders: ['M4 8h8', 'M18 8h2', 'M15 5.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z', 'M4 16h2', 'M12 16h8',
    'M9 13.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z'],
  moon: ['M20 14.5A8.5 8.5 0 1 1 9.5 4 7 7 0 0 0 20 14.5z'],
  sun: ['M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z', 'M12 2v2', 'M12 20v2', 'M2 12h2', 'M20 12h2', 'M5 5l1.4 1.4',
    'M17.6 17.6 19 19', 'M5 19l1.4-1.4', 'M17.6 6.4 19 5'],
  send: ['M12 19V5', 'M6 11l6-6 6 6'],
  stop: ['M7 7h10v10H7z'],
  down: ['M12 5v14', 'M6 13l6 6 6-6'],
  left: ['M15 6l-6 6 6 6'],
  right: ['M9 6l6 6-6 6'],
  copy: ['M9 9h11v11H9z', 'M5 15H4V4h11v1'],
  check: ['M5 12.5l4.5 4.5L19 7.5'],
  again: ['M20 11a8 8 0 1 0-2.3 6.3', 'M20 5v6h-6'],
  edit: ['M4 20h4L19 9l-4-4L4 16z', 'M13.5 6.5l4 4'],
  close: ['M6 6l12 12', 'M18 6 6 18'],
  fork: ['M6 4v16', 'M6 14c0-4 12-2 12-8V4', 'M18 4v2'],
  cut: ['M4 12h10', 'M18 5v14', 'M10 8l4 4-4 4'],
  pin: ['M9 4h6l-1 7 3 3H7l3-3z', 'M12 14v6'],
  save: ['M12 4v11', 'M7 11l5 5 5-5', 'M5 20h14'],
  text: ['M5 6h14', 'M5 12h14', 'M5 18h9'],
  list: ['M8 6h12', 'M8 12h12', 'M8 18h12', 'M4 6h.01', 'M4 12h.01', 'M4 18h.01'],
  many: ['M4 12h5', 'M9 12c4 0 3-6 8-6h3', 'M9 12h11', 'M9 12c4 0 3 6 8 6h3'],
  sides: ['M4 5h7v14H4z', 'M13 5h7v14h-7z'],
  chance: ['M5 20V10', 'M12 20V4', 'M19 20v-6'],
  clip: ['M20 11.5 12 19.5a5 5 0 0 1-7-7l8.5-8.5a3.3 3.3 0 0 1 4.7 4.7L9.7 17.2a1.7 1.7 0 0 1-2.4-2.4l7.6-7.6'],
  bin: ['M5 7h14', 'M9 7V4h6v3', 'M7 7l1 13h8l1-13'],
};

/** A small drawing, hidden from screen readers: its button has the words. */
export function icon(name) {
  const drawing = document.createElementNS(SVG, 'svg');
  drawing.setAttribute('viewBox', '0 0 24 24');
  drawing.setAttribute('class', 'icon');
  drawing.setAttribute('aria-hidden', 'true');
  for (const d of PATHS[name]) {
    const path = document.createElementNS(SVG, 'path');
    path.setAttribute('d', d);
    drawing.append(path);
  }
  return drawing;
}

/** A button with a drawing; `label` is what it is called. */
export function iconButton(name, label, onClick, props = {}) {
  return el('button', { type: 'button', class: 'small', 'aria-label': label, title: label, on: { click: onClick }, ...props },
    icon(name));
}
