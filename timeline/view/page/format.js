// The formats of numbers, which are those of hvdrun timeline, and of names.

// places formats a number with up to three significant digits.
function places(v) {
  if (v === 0) return '0';
  if (v < 9.995) return v.toFixed(2);
  if (v < 99.95) return v.toFixed(1);
  return v.toFixed(0);
}

// duration formats a time in microseconds.
export function duration(us) {
  if (us < 0) return '-' + duration(-us);
  if (us >= 0.9995e6) return places(us / 1e6) + ' s';
  if (us >= 0.9995e3) return places(us / 1e3) + ' ms';
  return places(us) + ' us';
}

// percent formats a share.
export function percent(share) {
  const p = 100 * share;
  if (p === 0) return '0 %';
  if (p < 0.1) return 'less than 0.1 %';
  if (p < 9.95 || (p >= 99 && p < 99.95)) return p.toFixed(1) + ' %';
  return p.toFixed(0) + ' %';
}

// size formats a number of bytes.
export function size(bytes) {
  if (bytes >= 2 ** 30) return places(bytes / 2 ** 30) + ' GiB';
  if (bytes >= 2 ** 20) return places(bytes / 2 ** 20) + ' MiB';
  if (bytes >= 2 ** 10) return places(bytes / 2 ** 10) + ' KiB';
  return bytes.toFixed(0) + ' B';
}

// count formats a number of things.
export function count(n) { return n.toLocaleString('en-US'); }

// plain makes a name visible: characters that control a terminal or the direction of text become escapes. A text
// of any length becomes one of at most 300 characters.
export function plain(name) {
  const text = name.length > 300 ? name.slice(0, 300) + '…' : name;
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu,
    c => '\\u' + c.codePointAt(0).toString(16).padStart(4, '0'));
}

// sentence turns a clause of the report into a sentence.
export function sentence(clause) {
  const text = plain(clause);
  return text && (/^\S*[./]\S/.test(text) ? text[0] : text[0].toUpperCase()) + text.slice(1) + '.';
}
