// Helpers that make elements. Texts are only set as text, never as markup.

// el makes an element with attributes and children. An attribute that is a function is a listener.
export function el(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') e.addEventListener(name, value);
    else if (value === true) e.setAttribute(name, '');
    else if (value !== false && value !== undefined) e.setAttribute(name, value);
  }
  e.append(...children.filter(c => c !== undefined && c !== ''));
  return e;
}

// $ returns the element with an id.
export function $(id) { return document.getElementById(id); }

// say tells people who use a screen reader what has happened.
export function say(text) { $('said').textContent = text; }

// fit makes a canvas as large as its place on the screen, and returns its context, in CSS pixels.
export function fit(canvas, width, height) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const w = Math.round(width * scale);
  const h = Math.round(height * scale);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = height + 'px';
  }
  const c = canvas.getContext('2d');
  c.setTransform(scale, 0, 0, scale, 0, 0);
  return c;
}

// color returns a colour of the style sheet.
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
}

// channels returns red, green and blue of a colour such as #0072b2.
export function channels(hex) { return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)); }

// hatch returns a pattern of diagonal lines.
export function hatch(context, line, ground) {
  const tile = document.createElement('canvas');
  tile.width = tile.height = 8;
  const c = tile.getContext('2d');
  if (ground) {
    c.fillStyle = ground;
    c.fillRect(0, 0, 8, 8);
  }
  c.strokeStyle = line;
  c.lineWidth = 1.5;
  c.beginPath();
  for (const x of [-8, 0, 8]) {
    c.moveTo(x, 8);
    c.lineTo(x + 8, 0);
  }
  c.stroke();
  return context.createPattern(tile, 'repeat');
}
